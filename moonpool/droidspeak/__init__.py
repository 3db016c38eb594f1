"""`moonpool droidspeak profile`: which layers a model must compute itself to reuse a sibling's KV (DroidSpeak).

1. `examples.py`: read contexts and questions.
2. `measuring.py`: answer every question with every group of layers computed by the receiver.
3. `frontier.py`: keep the groups that are worth choosing from.
4. `picture.py`: draw them.

`pair.py` does the first three for a sender and a receiver.
"""
