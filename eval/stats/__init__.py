"""What follows from verdicts.

formulas        intervals, means over posts and seeds, paired tests, logistic models
reward_pairs    a reward model on held-out pairs: intervals, groups, beside the longer one
correction      the win rate behind a judge's known errors
length_control  the win rate at equal length
simple_judges   kappa; a judge beside the longest text, the majority label and the most overlap
table           every rate of a table of verdicts, with its interval
"""
