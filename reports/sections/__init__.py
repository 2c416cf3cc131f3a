"""Parts of pages.

judging      who judged, every rate, controls
calibration  the judge beside labels, and the rates that they correct
scores       proxy and gold score, accuracy beside length, spreads over the posts
samples      posts with every summary, and what policies sampled while they learned
critic       PPO's critics of several groups of runs, side by side
curves       everything that training logged, and DPO's policy as a reward model
made_with    settings, time, versions, hashes; a policy that others trained
"""
