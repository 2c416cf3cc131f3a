"""Numbers that stages and the plan of their work share, and no setting changes. Standard library
only.
"""

# Logits of one chunk. A GPU needs more to be busy.
CHUNK = {"cpu": 2**24, "cuda": 2**27}

# References on which `normalize` checks the saved model. A wrong shift, or padding that is read,
# moves the score of every row, so some rows show it.
CHECKED_ROWS = 1024
