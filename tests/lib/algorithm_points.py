"""Points of algorithms with a known difference at equal KL."""

from reports.algorithm_points import Point

POSTS = 400


def line(algorithm, *rates, kls=(1, 4), seed=1, golds=None, proxies=None):
    """The points of an algorithm in one seed: a win rate at each KL; every post has this score."""
    points = []
    for place, (rate, kl) in enumerate(zip(rates, kls, strict=True)):
        points.append(
            Point(
                seed=seed,
                algorithm=algorithm,
                setting=str(1 / kl) if kl else "",
                kl=kl,
                win_rate=rate,
                gold=golds[place] if golds else None,
                proxy=proxies[place] if proxies else 0.0,
                tokens=16.0,
                seconds={"ppo": 41.2, "rloo": 5.0}.get(algorithm),
                post_scores={f"post{number}": rate for number in range(POSTS)},
                texts={f"post{number}": f"post{number}" for number in range(POSTS)},
            )
        )
    return points


def lines(algorithm, *rates, **others):
    """A line for each seed, with one win rate throughout."""
    points = []
    for seed, rate in enumerate(rates):
        points += line(algorithm, rate, rate, seed=seed, **others)
    return points


PPO = lines("ppo", 0.8, 0.8, 0.8)


# Minus PPO's: 0.05 on average, standard deviation 0.01, t = 0.05 / (0.01 / sqrt(3)) = 8.66 with 2
# degrees of freedom, p = 0.0131, and the interval is 0.05 -+ 4.303 * 0.01 / sqrt(3).
RLOO = lines("rloo", 0.84, 0.85, 0.86)
