"""Statistics of verdicts and scores.

intervals         means and shares with 95% intervals, over posts and over seeds
hypothesis_tests  p-values, and Holm's correction for several of them
logistic          logistic regression with standard errors clustered by post
verdict_table     the verdicts about one policy as columns of numbers
table             every rate of such a table with its interval, and the judge's biases
length_control    the win rate at equal length
correction        the win rate after correcting for a judge's known errors
simple_judges     kappa; a judge compared with the longest text, the majority and the overlap
reward_pairs      a reward model on held-out pairs: accuracy, groups, calibration, length
"""
