"""Which summaries are better, and how sure that is.

summaries      what each policy writes about held-out posts
summarize      what each policy writes about one post that is typed
outputs        summaries that exist already, in files
judge          each summary against the reference, in both orders
win_rate       win rates against the reference, with intervals; proxy and gold scores
control_texts  texts whose worth is known from how they were made
controls       these texts, judged by the same judge
scores         how far two scorers agree; what a reward model's score gained; its held-out pairs
calibration    the judge beside labelled comparisons
judges         who compares
stats          what follows from verdicts
"""
