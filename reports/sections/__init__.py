"""Parts of pages.

judge      who judged, every rate, controls
calibration  the judge beside labels, and what they correct
length     a reward model's accuracy beside the longer one's
scores     proxy and gold score, where a gold reward model judged
dpo        DPO's policy as a reward model
released   the page of a policy that others trained
systems    several systems side by side
samples    the first held-out posts with every summary
curves     everything that training logged
spread     scores, lengths and distances over the posts
training_samples  what PPO sampled while it learned
made_with  settings, time, versions, hashes
"""
