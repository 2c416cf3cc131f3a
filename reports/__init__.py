"""Pages: typed results of finished runs, and templates that hold the text.

results             finished runs, read from their folders into types
posts, samples      the judged posts of a run, and examples of them
scores, gains       proxy and gold scores
verdicts            one word for every comparison of two policies
entries             policies of runs that are compared, paired by seed and post
curves, plots       what is drawn
formats, render     numbers as text; templates -> Markdown -> HTML
limits              when a limitation is worth a line
provenance          settings, code, machines and files behind a page
run                 the page of one run
outputs             the page of summaries that existed already
calibration         the page of a judge compared with labels
compare             the page about policies of finished runs
ablations           the page about one changed setting at a time
algorithms          the page about PPO and the other algorithms at equal KL: what it is
                    computed from (algorithm_points), who is better (equal_kl), each setting
                    (penalties), what is drawn (algorithm_figures)
scaling             the page about model sizes, compared with the paper: win rates over seeds
                    (pooled_rates), failed_seeds, each size (sizes), and how numbers change with
                    size (growth)
publish             copies finished pages to reports/generated
"""
