"""Turns plans and other texts into malformed ones."""

from random import Random

VALUES = (
    "0", "-1", "1", "3", "7", "2.5", "1e-9", "9223372036854775807", "9223372036854775808", "-9223372036854775809",
    "0x" + "f" * 500, "9" * 5000, "1e-300", "1e308", "1e400", "inf", "-inf", "nan", "-nan", "true", "false", '""',
    '"on"', '"off"', '"malicious-server"', '"epoch"', '"batch"', '"own"', '"sphere"', '"rademacher"', '"median"',
    '"\\u001b[2J"', '"\\ud800"', '"\\U0010ffff"', '"\x7f"', '"os:getcwd"', '"no.such.module:f"', '"mnist"',
    '"../../etc/passwd"', '"' + "x" * 3000 + '"', "[]", "[[]]", "[[0,1,0,0,1]]", "[[0,1],[1,2]]", "[1, 2, 3]",
    "[" * 300, "[" * 60 + "]" * 60, "{}", "{a=" * 90, '{name = "custom", factory = "os:getcwd"}', '{name = "onnx"}',
    '{name = "lenet", channels = [0, 1]}', '{name = "lenet", channels = [9223372036854775807, 2]}', "{name = 3}",
    '{name = "softmax"}', '{name = ["lenet"]}', '{name = "wrn", depth = 4000000000}', "1979-05-27", "1979-99-99",
    "07:32:00", "1979-05-27T07:32:00Z", "[{k = 1, share = 1.0}]", "[{k = 1, share = 5e-324}]", "[{k = 0}]",
    "[1, 'a', {}]", '"""', "'", "{", "}", "#", "=", "",
)  # fmt: skip

SETTINGS = tuple(
    f"{table}.{name}" if table else name
    for table, names in {
        "": "name seed rounds estimator task federation probe update ring secure privacy run nothing",
        "task": "data pixels augment loss metrics init model model.name model.channels model.depth",
        "federation": "clients participation partition alpha floor_samples level seeds batch epochs steps weighting "
        "tiers dropout",
        "probe": "k sigma scheme distribution micro_batch precision memory_mb supports layout "
        "shapes together head head_at stacked",
        "update": "optimizer moments layers rate betas momentum weight_decay clip ema norm_max stages",
        "ring": "d_max update_max head_max n_max",
        "secure": "mode floor threshold groups group_seeds combine",
        "privacy": "noise epsilon delta clip head_factor sharers",
        "run": "model runtime downlink workers device evaluate_every snapshot_every commit_seconds features_mb "
        "deadline_seconds",
    }.items()
    for name in names.split()
)

ODD = ("\0", "\x1b[2J", "\r", "\u2028", "\ufeff", "é", "\U0001f4a3", "\ud7ff", "\u202e", "\n", "'", '"', "\\", ".", "=")
TABLES = (
    "[probe]",
    "[run]",
    "[[federation.tiers]]",
    "[a.b.c]",
    "[]",
    "[[",
    "[federation]\n[federation]",
    "[task.model]",
)


def damaged_text(draw: Random, text: str) -> str:
    """A plan, or another text of lines, with one to three things wrong with it."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        text = draw.choice(_WAYS)(draw, text)
    return text


def _another_value(draw: Random, text: str) -> str:
    """One of the text's own settings, with another value."""
    lines = text.split("\n")
    settings = [number for number, line in enumerate(lines) if "=" in line]
    if settings:
        number = draw.choice(settings)
        name, _, value = lines[number].partition("=")
        lines[number] = f"{name}= {draw.choice((draw.choice(VALUES), _nearly(draw, value.strip())))}"
    return "\n".join(lines)


def _nearly(draw: Random, value: str) -> str:
    """A value of the same kind."""
    match value[:1]:
        case '"':
            return draw.choice([known for known in VALUES if known.startswith('"')])
        case digit if digit.isdigit():
            return draw.choice(
                ("0", "1", "2", "3", "5", "0.5", "1e-3", "100", "10000", f"{value}0", f"-{value}", value[1:])
            )
        case _:
            return value.replace(draw.choice("0123456789"), draw.choice("0123456789"))


def _another_setting(draw: Random, text: str) -> str:
    """A setting more, which may stand there already, in a wrong place, or with a name that is none."""
    line = f"{draw.choice(SETTINGS)} = {draw.choice(VALUES)}"
    return f"{line}\n{text}" if draw.random() < 0.7 else f"{text}\n{line}"


def _lines(draw: Random, text: str) -> str:
    lines = text.split("\n")
    at, to = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(to, lines[at])
        case 2:
            lines[at], lines[to] = lines[to], lines[at]
        case _:
            lines.insert(at, draw.choice(TABLES))
    return "\n".join(lines)


def _letters(draw: Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    match draw.randrange(4):
        case 0:
            return text[:at] + draw.choice(ODD) + text[at:]
        case 1:
            return text[:at] + text[at + draw.randrange(1, 20) :]
        case 2:
            return text[:at] + chr(draw.randrange(1, 0x250)) + text[at + 1 :]
        case _:
            return text[:at]


def _repeated(draw: Random, text: str) -> str:
    """Something very long, very deep or very often. It is rare, because it takes time to read."""
    if draw.random() < 0.9:
        return _letters(draw, text)
    times = draw.choice((10, 100, 3000))
    piece = draw.choice(("a.", "[", "{a=", "[[a]]\n", "x", "9", " ", "#\n", "k = [", '"', "[t]\n", "\\u001b", "k=1\n"))
    return draw.choice((text + "\n", "name = ", "")) + piece * times + draw.choice(("", " = 1", "]" * times))


_WAYS = (_another_value, _another_value, _another_setting, _another_setting, _lines, _letters, _repeated)
