"""Which summaries are better, and how sure that is.

summaries      what each policy writes about held-out posts
summarize      what each policy writes about one post that is typed
outputs        existing summaries, from files
judge          each summary compared with the reference, in both orders
win_rate       win rates against the reference, with intervals
scores         scores by a judge and by reward models, and a reward model's held-out accuracy
control_texts  texts whose worth is known from how they are built
controls       these texts, judged by the same judge
calibration    the judge compared with labeled comparisons
judges         who compares
stats          statistics of verdicts and scores
"""
