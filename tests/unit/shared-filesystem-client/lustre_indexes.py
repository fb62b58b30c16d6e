"""Indexes of archives with Lustre clients: names and versions as the vendors' pages show them, cut to a few entries."""

AWS = """\
Package: lustre-client-modules-6.8.0-1012-aws
Version: 2.15.6-1fsx2
Architecture: amd64
Depends: linux-image-6.8.0-1012-aws, lustre-client-utils
Filename: ubuntu/pool/main/l/lustre-client-modules-6.8.0-1012-aws_2.15.6-1fsx2_amd64.deb

Package: lustre-client-modules-6.8.0-1015-aws
Version: 2.15.6-1fsx3
Architecture: amd64
Depends: linux-image-6.8.0-1015-aws, lustre-client-utils

Package: lustre-client-modules-6.14.0-1007-aws
Version: 2.15.6-1fsx4
Architecture: amd64

Package: lustre-client-modules-aws
Version: 6.14.0.1007.7
Architecture: amd64
Depends: lustre-client-modules-6.14.0-1007-aws

Package: lustre-client-utils
Version: 2.15.6-1fsx4
Architecture: amd64
Description: Userspace utilities
 with a line that begins like a field:
 Package: nothing
"""

GCP = """\
Package: lustre-client-modules-6.8.0-1021-gcp
Version: 2.14.0-ddn184-1
Architecture: amd64

Package: lustre-client-utils
Version: 2.14.0-ddn184-1
Architecture: amd64
"""

AZURE = """\
Package: amlfs-lustre-client-2.15.6-39-g3e00a10
Version: 6.8.0-1021-azure
Architecture: amd64

Package: amlfs-lustre-client-2.15.7-33-g79ddf99
Version: 6.8.0-1021-azure
Architecture: amd64

Package: amlfs-lustre-client-2.15.7-33-g79ddf99
Version: 6.8.0-1029-azure
Architecture: amd64

Package: amlfs-lustre-client-2.16.1-14-gbc76088
Version: 6.8.0-1021-azure
Architecture: amd64

Package: lustre-client-modules-dkms-2.16.1
Version: 2.16.1
Architecture: amd64
"""

WHAMCLOUD = """\
Package: lustre-client-modules-6.8.0-60-generic
Version: 2.17.0-1
Architecture: amd64

Package: lustre-client-modules-dkms
Version: 2.17.0-1
Architecture: amd64

Package: lustre-client-utils
Version: 2.17.0-1
Architecture: amd64
"""

ALL = {"aws": AWS, "gcp": GCP, "azure": AZURE, "whamcloud": WHAMCLOUD}
