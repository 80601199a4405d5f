"""Slow, obvious versions of the metrics, in plain loops."""

import math


def auc(labels, scores):
    right, pairs = 0.0, 0
    for label, score in zip(labels, scores, strict=True):
        for other_label, other_score in zip(labels, scores, strict=True):
            if label == 1 and other_label == 0:
                pairs += 1
                right += 1.0 if score > other_score else 0.5 if score == other_score else 0.0
    return right / pairs


def counts(labels, scores, threshold):
    """True positives, false positives, false negatives, true negatives at score >= threshold."""
    true_positive = false_positive = false_negative = true_negative = 0
    for label, score in zip(labels, scores, strict=True):
        if score >= threshold and label == 1:
            true_positive += 1
        elif score >= threshold:
            false_positive += 1
        elif label == 1:
            false_negative += 1
        else:
            true_negative += 1
    return true_positive, false_positive, false_negative, true_negative


def average_precision(labels, scores):
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        true_positive, false_positive, false_negative, _ = counts(labels, scores, threshold)
        recall = true_positive / (true_positive + false_negative)
        total += (recall - recall_before) * true_positive / (true_positive + false_positive)
        recall_before = recall
    return total


def f1(labels, scores, threshold):
    true_positive, false_positive, false_negative, _ = counts(labels, scores, threshold)
    return 2 * true_positive / (2 * true_positive + false_positive + false_negative)


def max_f1(labels, scores):
    return max(f1(labels, scores, threshold) for threshold in scores)


def iou(labels, scores, threshold):
    true_positive, false_positive, false_negative, _ = counts(labels, scores, threshold)
    return true_positive / (true_positive + false_positive + false_negative)


def balanced_accuracy(labels, scores, threshold):
    true_positive, false_positive, false_negative, true_negative = counts(labels, scores, threshold)
    sensitivity = true_positive / (true_positive + false_negative)
    return (sensitivity + true_negative / (true_negative + false_positive)) / 2


def best_threshold(quality, labels, scores):
    """Highest of the best cuts, at the midpoint to the next lower score."""
    distinct = sorted(set(scores), reverse=True)
    best, best_value = 0, -math.inf
    for place, threshold in enumerate(distinct):
        value = quality(labels, scores, threshold)
        if value > best_value + 1e-12:
            best, best_value = place, value
    return distinct[best] if best + 1 == len(distinct) else (distinct[best] + distinct[best + 1]) / 2


def dice(labels, scores, slope, intercept):
    overlap = total = 0.0
    for label, score in zip(labels, scores, strict=True):
        probability = 1 / (1 + math.exp(-(slope * score + intercept)))
        overlap += 2 * label * probability
        total += label + probability
    return overlap / total
