"""The state of a training: what it holds, how it is saved, and how new processes receive it."""
