"""Writes tests/data/token_golden.json.gz: 2,000 lines and the ids that llama.cpp gives them.

Run with a Python that has llama-cpp-python (0.3.36 made the file in use):
`python scripts/make_token_golden.py MODEL.gguf`.
The lines come from `golden_lines()`, which is deterministic; the check compares them with the file as well.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "token_golden.json.gz"

_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "don't it's they'll we've I'm you'd John's O'Brien naïve café résumé Zürich coöperate e-mail re-do U.S.A. etc. "
    "Throughput latency tokenizer quantization Mississippi onomatopoeia antidisestablishmentarianism"
).split()
_CODE = (
    "def f{n}(x, y={n}):",
    "    return x**{n} + y[{n}:{m}]",
    "\tif (a[{n}] != b->c) {{ return NULL; }}",
    "        for i in range({n}, {m}):  # TODO: {w}",
    "const {w}{n} = async () => {{ await fetch(`/api/${{id}}?x={n}`) }};",
    "    #include <{w}.h>",
    "            self.{w}_{n} = np.zeros(({n}, {m}), dtype=np.float32)",
    "SELECT {w}, COUNT(*) FROM t{n} WHERE {w} >= {m}.{n} GROUP BY 1;",
    "\t\t\tcase 0x{n:x}: goto L{m};",
    "fn {w}<'a, T: Into<String>>(v: &'a [T]) -> Result<(), E> {{",
    "<div class=\"{w} {w}-{n}\" id='x{n}'>&nbsp;{m}%</div>",
    '{{"{w}": [{n}, {m}, null, true], "{w}{n}": "\\n\\t\\u00e9"}}',
    "$ ls -la ~/{w}/*.{w} | grep -v '{n}' && echo \"done\" >> /tmp/{w}.log 2>&1",
)
_CJK = (
    "漢字仮名交じり文今日天気明日東京大阪人工知能模型語言模型推理速度你好世"
    "界中文測試简体繁體한국어서울안녕하세요토큰ひらがなカタカナー、。「」！？"
)
_OTHER = (
    "ÀÉîõüßæøåłžčšđþÐ ЖдёйцщъыьэюяІЇЄ αβγδεζηθικλμνξοπρστυφχψω אבגדהו"
    "זחט ابتثجحخد हिन्दी ไทย ქართული Հայերեն ½¼¾²³№™©€£¥§¶†‡•…–—‘’“”«»"
)
_EMOJI = ("😀", "👩‍🚀", "🇨🇿", "👍🏽", "❤️", "🏳️‍🌈", "🧑‍🤝‍🧑", "🎉", "✨", "🤖", "☕", "1️⃣", "🫠", "🀄")
_CONTROL = [
    chr(c) for c in (*range(32), 127, 0x80, 0x85, 0x9F, 0xA0, 0xAD, 0x200B, 0x200D, 0x2028, 0x3000, 0xFEFF, 0xFFFD)
]
_MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<file_sep>", "</s>", "[INST]")


def golden_lines(count: int = 2000, seed: int = 7) -> list[str]:
    """Return the lines: one eighth each of eight kinds of text."""
    rng = random.Random(seed)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(low, high)))

    def english() -> str:
        text = words(4, 18)
        for _ in range(rng.randint(0, 3)):
            text += rng.choice((", ", ". ", "; ", " - ", "? ", "! ", ": ", "... ", "  ", ' "', " (")) + words(1, 6)
        return text if rng.random() < 0.5 else text.capitalize() + rng.choice((".", "!", "?", ".)", '."', " ", "   "))

    def code() -> str:
        template = rng.choice(_CODE)
        n, m, w = rng.randint(0, 300), rng.randint(0, 99999), rng.choice(_WORDS)
        line = " " * rng.choice((0, 0, 1, 2, 4, 8, 12, 20)) + template.format(n=n, m=m, w=w)
        return line + "\n" + " " * rng.randint(0, 9) + template.format(n=m, m=n, w=w) if rng.random() < 0.4 else line

    def digits() -> str:
        parts = []
        for _ in range(rng.randint(2, 9)):
            number = rng.choice(
                (str(rng.randint(0, 10 ** rng.randint(1, 12))), f"{rng.random():.6f}", "١٢٣", "²³", "Ⅷ", "①")
            )
            parts.append(" " * rng.randint(0, 4) + number + rng.choice(("", ",", ".", "%", " ", "th", "-", "/", ":")))
        return words(0, 2) + "".join(parts)

    def cjk() -> str:
        text = "".join(rng.choice(_CJK) for _ in range(rng.randint(3, 30)))
        return (
            text
            if rng.random() < 0.6
            else text[: len(text) // 2] + " " + words(1, 3) + str(rng.randint(0, 99)) + text[-4:]
        )

    def other() -> str:
        return "".join(rng.choice(_OTHER) for _ in range(rng.randint(3, 40)))

    def emoji() -> str:
        return (
            words(0, 4)
            + "".join(rng.choice(("", " ", "  ")) + rng.choice(_EMOJI) for _ in range(rng.randint(1, 8)))
            + words(0, 2)
        )

    def control() -> str:
        parts = [
            rng.choice((*_CONTROL, "\n", "\r\n", "\t", "\n\n", "  ", words(1, 2), words(1, 1)))
            for _ in range(rng.randint(2, 16))
        ]
        return "".join(parts)

    def mixture() -> str:
        makers = (english, code, digits, cjk, other, emoji, control, lambda: rng.choice(_MARKERS))
        return rng.choice(("", " ", "\n")).join(rng.choice(makers)() for _ in range(rng.randint(2, 4)))

    makers = (english, code, digits, cjk, other, emoji, control, mixture)
    return [makers[i % len(makers)]() for i in range(count)]


def main() -> None:
    import llama_cpp

    llama = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    lines = golden_lines()
    ids = [llama.tokenize(line.encode(), add_bos=False, special=False) for line in lines]
    made_by = f"llama.cpp via llama-cpp-python {llama_cpp.__version__}"
    data = json.dumps({"made_by": made_by, "lines": lines, "ids": ids}, ensure_ascii=True, separators=(",", ":"))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_bytes(gzip.compress(data.encode(), 9, mtime=0))
    print(
        json.dumps(
            {"lines": len(lines), "ids": sum(map(len, ids)), "nbytes": GOLDEN.stat().st_size, "made_by": made_by}
        )
    )


if __name__ == "__main__":
    main()
