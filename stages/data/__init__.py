"""The data: from text to tokens.

builtin       the built-in posts: what they say, what a summary is worth, their files
readers       the splits of the data, from files or the hub, checked row by row
tables        JSON, CSV and Parquet files, row by row
formats       the user's own kinds of rows, converted to the schemas of the real data
conversations chat messages: who says what, and which turn is the answer
chat          a conversation by the tokenizer's own chat template
schemas       the two schemas of the real data: checks, and reading fields of a row
bad_rows      rows that cannot be used: stop, or skip and list them
row_counts    what the manifest says about the rows: odd ones, repeated ones, published ones
halves        two halves of the comparisons that have no post in common
prompt        the prompt, and how it is cut
tokens        rows to tokens
lengths       limits on lengths in tokens: checked and counted
ragged        tokenized splits as stages read them, padding
text_metrics  measures of text that need no model
"""
