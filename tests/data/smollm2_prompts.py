"""The twenty prompts of ``smollm2_greedy.json``: name -> text. Written for this purpose; 5 to 400 tokens."""

from __future__ import annotations

_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def chat(*turns: str, system: str = _SYSTEM) -> str:
    """User and assistant turns in ChatML, ready for the assistant's next."""
    out = system
    for index, turn in enumerate(turns):
        out += f"<|im_start|>{'assistant' if index % 2 else 'user'}\n{turn}<|im_end|>\n"
    return out + "<|im_start|>assistant\n"


_HARBOUR = """\
The harbour had been quiet since the ferry stopped running in October. Nets hung from the wall of the ice house, \
stiff with salt, and the only boat still in the water belonged to a man who never went out in it. Every morning he \
rowed the forty metres from the steps to his mooring, sat in the cabin with a newspaper for an hour, and rowed back. \
Nobody asked him why. In a village of sixty people you learn to leave some questions where they lie.

It was the schoolteacher who finally noticed that the boat had begun to sit lower at the stern. She counted the \
planks above the water from her kitchen window, nine on Monday, eight on Thursday, seven and a half the week after, \
and wrote the numbers in the margin of the register next to the names of absent children. By the first snow there \
were five. She put on her husband's coat, walked down past the chapel and the closed post office, and stood on the \
steps until the man looked up from his paper.

"You are sinking," she said.

"Slowly," he agreed, and turned the page.

She waited. The wind came round the end of the breakwater and lifted the corner of the newspaper, so that for a \
moment she could read the date on it, which was eleven years old. The tide was going out, and the mooring rope, \
green where it met the water, creaked like a door. Somewhere behind her a dog barked twice and was called in. When \
he spoke again it was without lifting his eyes, and in the tone of someone who has practised a sentence for a long \
time and no longer expects to need it.

"My brother built her," he said. "He told me she would stay afloat for as long as somebody"\
"""

_LEDGER = """\
Quarterly report, northern warehouses. Stock at the beginning of the period was 4,812 units in Site A, 3,977 in \
Site B and 1,205 in Site C. During the quarter 2,340 units came in and 2,918 went out; 61 were written off as damaged. \
The largest customer took 1,106 units in 14 deliveries, an average of 79 a delivery. Rent rose by 3.5% to $18,420 a \
month, electricity fell by 11.2% after the new lamps were fitted, and wages stayed at $96,300. One forklift was \
replaced at a cost of $27,950 and is written down over seven years. Staff turnover was two out of twenty-three. \
In summary, the most important figures of the quarter are:\n1."""

PROMPTS: dict[str, str] = {
    "prose, five tokens": "Once upon a time there",
    "fact": "The chemical symbol for gold is Au, and the chemical symbol for iron is",
    "code, python": (
        "def merge(left: list[int], right: list[int]) -> list[int]:\n"
        '    """Merge two sorted lists into one sorted list."""\n'
        "    out = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    ),
    "code, c": (
        "#include <stdio.h>\n#include <stdlib.h>\n\nstruct node {\n    int value;\n    struct node *next;\n};\n\n"
        "/* Reverses the list in place and returns the new head. */\nstruct node *reverse(struct node *head)\n{\n"
    ),
    "code, sql": (
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount REAL, placed DATE);\n"
        "-- total amount of each customer in 2023, largest first\nSELECT"
    ),
    "numbers, counting": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,",
    "numbers, table": "x\tx^2\tx^3\n1\t1\t1\n2\t4\t8\n3\t9\t27\n4\t16\t64\n5\t25\t125\n6\t",
    "numbers, report": _LEDGER,
    "german": "Der alte Müller öffnete die Tür und sagte zu den müden Wanderern: Kommt herein, es wird gleich",
    "french": "Le petit déjeuner était prêt, mais personne n'avait faim. La mère regarda par la fenêtre et",
    "chinese": "北京是中国的首都，也是一座历史悠久的城市。每年有许多游客来到这里，",
    "russian": "Зима в этом году пришла рано. Снег лежал на крышах домов, и дети",
    "japanese, arabic, emoji": "東京の天気は晴れです。 الطقس جميل اليوم 🌍🚀 — translation:",
    "chat, question": chat("What is the capital of France?"),
    "chat, two turns": chat(
        "Give me three tips for growing tomatoes on a balcony.",
        "1. Choose a compact variety.\n2. Use a pot of at least 20 litres.\n3. Water in the morning, at the root.",
        "Which of these matters most in a dry summer, and why?",
    ),
    "chat, own system prompt": chat(
        "Summarise: The committee met on Tuesday, could not agree on the budget, and will meet again in May.",
        system="<|im_start|>system\nYou answer in one short sentence and never use the letter z.<|im_end|>\n",
    ),
    "repeated words": "the cat and the dog and " * 24,
    "repeated lines": "- [ ] buy milk\n- [x] call Anna\n" * 12,
    "json": '{"users": [{"id": 1, "name": "Ada", "tags": ["admin", "ops"]}, {"id": 2, "name": "Linus", "tags": [',
    "prose, long": _HARBOUR,
}
