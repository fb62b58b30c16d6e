"""Values that a shell, YAML or a path would misread, and the parameters that take text."""

from harness import META

TEXTS = [
    (action, name)
    for action, about in META["actions"].items()
    for name, schema in about["params"].items()
    if "string" in schema["type"]
]
# What shells, Slurm, jinja2, terminals, JSON, YAML and filesystems would each like to interpret.
NASTY = [
    "'", '"', "`", "\\", "$", "!", "*", "?", "~", "#", ";", "|;", "<", ">", "(", ")", "[a", "{", "}", "a'b", 'a"b', "a`b`",
    "'; touch /tmp/pwned; '", '"; touch /tmp/pwned; "', "$(touch /tmp/pwned)", "`touch /tmp/pwned`", "${IFS}", "$HOME", "$'\\n'",
    "a;b", "a&&b", "a||b", "a > b", "a < b", ">(x)", "<(x)", "!!", "~root", "~/x", "*", "/*", "a?b", "{a,b}", "a\nb", "a\n", "\na",
    "a\n#SBATCH --uid=0", "\n#SBATCH --wrap=id", "a\r\nb", "a\rb", "a\tb", "a\x0bb", "a\x0cb", "a\x00b", "\x00", "a\x1b[31mb",
    "\x1b]0;title\x07", "\x7f", "a\x08b", "\u202eevil", "a\u200bb", "\u00e9", "\u00df", "\u4e2d\u6587", "\U0001f600", "\ufeffa",
    "\ud800", "a\u2028b", "a\u0085b", "\uff0e\uff0e\uff0f", "caf\u0301e", "{{ 7*7 }}", "{{7*7}}", "{% raw %}", "{%raw%}", "{# x #}",
    "{{ ''.__class__.__mro__ }}", "{{ config }}", "${{ x }}", "#{7*7}", "<%= 7*7 %>", "%{x}", "%(x)s$",
    "file:///etc/passwd$",
    "-rf;", "--uid=0;", "a b;c", "null\x00", "a" * 5000, "a" * (1 << 20), "$(" * 2000, "\n" * 3000, "'" * 4096,
    "%n%n%n$", "%s'%s", "\\x41", "\\u0041", "\\0", "&amp;", "&#39;", "<script>", "' OR 1=1 --", '{"a": 1}', "[1, 2]", "!!python/object:os.system",
    "&anchor *anchor", "a: b\nc: d", "|\n  x", "> x", "? x", "@\n", "^C^D\x03\x04", "a\\\nb", "a$(id)b", "x=$((1+1))",
    "name\x00.py", "/mnt/shared/\x00", "/mnt/shared/a b'c", "/mnt/shared/$(id)", "/mnt/shared/`id`", "/mnt/shared/{{x}}",
    "/mnt/shared/\n", "/mnt/shared/a;b", "/mnt/shared/*", "con\x00fig", "\x01", "\x1f",
    "\x80", "\xa0", "a\xadb", "\u2066x", "\u061c", "\u180e", "\ufffd", "\ufffe", "\U000e0001", "\udcff", "x\u0000y", "{}\x00",
    "LD_PRELOAD=/tmp/x.so;", "PATH=/tmp:$PATH", "A=$(id)", "A='b'", 'A="b"', "A=b;c", "A=b\nC=d", "=b'", "A=`id`",
    "SLURM_CONF=/tmp/x'", "A\x00=b", "1;A=b", "A B;", "PROMPT_COMMAND=id;", "--args $(id)", "--flag='x y'", "--flag=\"x y\"",
    "1-00:00:00;id", "60;id", "60$(id)", "60\n", "8G;id", "8G\n", "8G'", "$((8))G", "gpt;id", "gpt\n", "gpt'", "smoke\x00",
    "auto;id", "auto\n", "never'", "python-stdlib;", "python-stdlib\n", "byte'", "default\n#SBATCH", "default;id", "*\x00", "-\n",
    "a\u202f", "a\u3000b", "\u037e", "\uff04(id)", "\u2019", "a\x85b", "a\x1cb", "a\x1e", "a\x00\x00", "x\x00'", "\x00" * 5000,
    "a'" * 3, "--\n--", "a # b", "a & b", "b | c", "${x:-$(id)}", "$((`id`))", "a\\b", "~+", "%{", "^'",
]  # fmt: skip
ROAMING = [
    "../etc/passwd", "..", "../", "/../x", "a/../../b", "/a/../b", "./a", "a/./b", "//..", "../../../../../../etc/shadow",
    "/" + "a/" * 600, "/mnt/shared/../../etc", "/mnt/shared/..", "BASH_ENV=/tmp/x", "/mnt/shared/.", "/./mnt", "etc/passwd", "a/b",
]  # fmt: skip
