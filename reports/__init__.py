"""One file a page (`*_page`), and what they are made of.

run_page          one run
scaling           model sizes, compared with each other and with the paper
ablations_page    one switch at a time
algorithms        PPO and the other algorithms at equal KL
calibration_page  a judge beside labels
compare           policies of finished runs compared with the first of them
outputs_page      summaries that existed already
parts             what pages share: blocks, plots, words, tables
sections          parts of pages
publish           copies finished pages to reports/generated
"""
