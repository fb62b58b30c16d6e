"""An accident: this process and its workers may write no file above 20 kB."""

import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
