"""Which summaries are better, and how sure that is.

summaries      each policy's summaries of held-out posts
summarize      each policy's summary of one post that you type
outputs        existing summaries, read from files
judge          each summary compared with the reference, in both orders
win_rate       win rates against the reference, with intervals
scores         scores by a judge and by reward models, and a reward model's held-out accuracy
control_texts  texts whose quality is known from how they are built
controls       these texts, judged by the same judge
calibration    the judge compared with labeled comparisons
judges         the kinds of judges
stats          statistics of verdicts and scores
"""
