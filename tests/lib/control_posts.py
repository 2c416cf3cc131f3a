"""Posts for controls, and the names of the controls by kind."""

QUERY = "SUBREDDIT: r/x\n\nTITLE: A title\n\nPOST: First. Then\nmore.\n\nTL;DR:"
SHORT_OR_OFF_TOPIC = ("truncated", "first_sentence", "title", "other_post")
LONG_AND_ON_TOPIC = ("repeated", "padded", "contradicted", "swapped", "wrong_emphasis")
NEGATIVE_CONTROLS = (*SHORT_OR_OFF_TOPIC, *LONG_AND_ON_TOPIC)


def post(post_id, reference, query=QUERY):
    """A row with what controls are built from."""
    return {"id": post_id, "query": query, "reference": reference}
