"""Which summaries are better, and how sure that is.

summaries         what each policy writes about held-out posts
outputs           summaries that exist already, in files
judge             each summary against the reference, in both orders
win_rate          win rates against the reference, with intervals
controls          texts whose worth is known, judged by the same judge
calibration       the judge beside labelled comparisons
versus            two policies against each other
pairs             every two systems against each other
standings         all systems by one judge, several, a panel
leaderboard       the command that makes all of it
verdict_analysis  published verdicts, analysed as our own
judges            who compares
rates             what follows from verdicts
"""
