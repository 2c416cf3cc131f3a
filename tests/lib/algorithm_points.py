"""Points of algorithms with a known difference at equal KL."""

from reports.algorithm_points import Point

POSTS = 400
SECONDS = {"ppo": 41.2, "rloo": 5.0}


def line(algorithm, *rates, kls=(1, 4), seed=1, golds=None, proxies=None):
    """The points of an algorithm in one seed: a win rate at each KL, which is every post's score.

    `golds` and `proxies` are the scores at each KL.
    """
    if golds is None:
        golds = [None] * len(rates)
    if proxies is None:
        proxies = [0.0] * len(rates)

    points = []
    for rate, kl, gold, proxy in zip(rates, kls, golds, proxies, strict=True):
        setting = "" if kl == 0 else str(1 / kl)
        point = Point(
            seed=seed,
            algorithm=algorithm,
            setting=setting,
            kl=kl,
            win_rate=rate,
            gold=gold,
            proxy=proxy,
            tokens=16.0,
            seconds=SECONDS.get(algorithm),
            post_scores={f"post{number}": rate for number in range(POSTS)},
            texts={f"post{number}": f"post{number}" for number in range(POSTS)},
        )
        points.append(point)
    return points


def lines(algorithm, *rates, **options):
    """A line for each seed, with one win rate at every KL."""
    points = []
    for seed, rate in enumerate(rates):
        points += line(algorithm, rate, rate, seed=seed, **options)
    return points


PPO = lines("ppo", 0.8, 0.8, 0.8)


# Minus PPO's: 0.05 on average, standard deviation 0.01, t = 0.05 / (0.01 / sqrt(3)) = 8.66 with 2
# degrees of freedom, p = 0.0131, and the interval is 0.05 -+ 4.303 * 0.01 / sqrt(3).
RLOO = lines("rloo", 0.84, 0.85, 0.86)
