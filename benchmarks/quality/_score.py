"""AlgoPerf's score: how near each submission comes to the fastest one, over all workloads.

    r[s, w] = t[s, w] / min over s' of t[s', w]
    rho[s](tau) = fraction of workloads with r[s, w] <= tau
    score[s] = integral of rho[s] from 1 to m, divided by m - 1,   m = 4

The profile is a sum of steps, so the integral is the mean over workloads of (m - r) / (m - 1), where r is below m, and
0 otherwise: the fastest submission has 1 on a workload, one that takes 4 times as long, or never reaches the target, 0.

References:
    George E. Dahl, Frank Schneider, Zachary Nado and others: Benchmarking Neural Network Training Algorithms. 2023.
    https://arxiv.org/abs/2306.07179
"""

import math
from collections.abc import Mapping


def profile_scores(times: Mapping[str, Mapping[str, float]], max_ratio: float = 4.0) -> dict[str, float]:
    """Return the score of each submission, in [0, 1]; 1 means the fastest on every workload.

    Args:
        times: Time to the target by submission and workload, the median over studies (repetitions with other seeds);
            infinite if the target was not reached. All submissions have the same workloads.
        max_ratio: m, the ratio to the fastest from which on a submission gets nothing on a workload, greater than 1.

    Raises:
        ValueError: Submissions with other workloads than the first.
    """
    workloads = list(next(iter(times.values())))
    for submission, own in times.items():
        if set(own) != set(workloads):
            raise ValueError(f"{submission}: expected times of the workloads {workloads}, got {list(own)}")
    best = {workload: min(own[workload] for own in times.values()) for workload in workloads}

    def credit(seconds: float, least: float) -> float:
        return max(0.0, (max_ratio - seconds / least) / (max_ratio - 1)) if math.isfinite(seconds) else 0.0

    return {
        submission: sum(credit(own[workload], best[workload]) for workload in workloads) / len(workloads)
        for submission, own in times.items()
    }
