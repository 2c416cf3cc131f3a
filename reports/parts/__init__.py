"""What pages share.

collect         a finished run as one row of numbers, and what its other seeds logged
compared        an ablation beside the default run
comparison      what compare_page says, as figures
verdict         numbers in plain words
paper           the paper's numbers
opening         a run in four sentences
lineage         what a run was made from, as a picture
run_report      the stage that writes a run's page, and the manifests behind a page
plots           plots as SVG
panels          plots of score against distance, and of spreads
blocks          what pages are made of, as HTML and Markdown
numbers         tables as CSV and JSON, and what a page says
sample_rows     posts with all summaries and verdicts as rows
sample_browser  the block that searches them
token_view      the block that colours tokens of PPO
page            blocks, written as Markdown and HTML
"""
