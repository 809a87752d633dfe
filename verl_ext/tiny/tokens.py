"""Token ids of the tiny task: a byte's id is its value, and three special tokens follow."""

PAD_ID, START_ID, END_ID = 256, 257, 258
