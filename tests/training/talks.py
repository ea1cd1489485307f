"""Conversations to train on."""

TALKS = [
    [
        {"role": "user", "content": f"Write the function `f{i}`."},
        {"role": "assistant", "content": "def f():\n" * (i + 1)},
    ]
    for i in range(12)
]
