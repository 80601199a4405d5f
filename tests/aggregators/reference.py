"""Slow aggregators in plain Python, from the paper's formulas, for one bag at a time."""

import math

Vector = list[float]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def linear(state, name: str, vector: Vector) -> Vector:
    weight = state[f"{name}.weight"].tolist()
    bias = state[f"{name}.bias"].tolist() if f"{name}.bias" in state else [0.0] * len(weight)
    return [sum(w * x for w, x in zip(row, vector, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def softmax(scores: Vector) -> Vector:
    exponentials = [math.exp(score - max(scores)) for score in scores]
    return [value / sum(exponentials) for value in exponentials]


def weighted(weights: Vector, vectors: list[Vector]) -> Vector:
    return [sum(w * v[d] for w, v in zip(weights, vectors, strict=True)) for d in range(len(vectors[0]))]


def attention(state, bag: list[Vector]) -> Vector:
    scores = []
    for instance in bag:
        hidden = [math.tanh(x) for x in linear(state, "scores.hidden", instance)]
        if "scores.gate.weight" in state:
            gate = [sigmoid(x) for x in linear(state, "scores.gate", instance)]
            hidden = [h * g for h, g in zip(hidden, gate, strict=True)]
        scores.append(linear(state, "scores.score", hidden)[0])
    return softmax(scores)


def layer_norm(state, name: str, vector: Vector) -> Vector:
    if f"{name}.weight" not in state:
        return vector
    mean = sum(vector) / len(vector)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in vector) / len(vector) + 1e-5)
    weight, bias = state[f"{name}.weight"].tolist(), state[f"{name}.bias"].tolist()
    return [(x - mean) / deviation * w + b for x, w, b in zip(vector, weight, bias, strict=True)]


def transformer_block(state, name: str, bag: list[Vector], heads: int) -> list[Vector]:
    width = len(bag[0]) // heads
    normed = [layer_norm(state, f"{name}.attention_norm", instance) for instance in bag]
    projected = {part: [linear(state, f"{name}.{part}", h) for h in normed] for part in ("query", "key", "value")}
    attended: list[Vector] = [[] for _ in bag]
    for head in range(heads):
        columns = slice(head * width, (head + 1) * width)
        query, key, value = ([row[columns] for row in projected[part]] for part in ("query", "key", "value"))
        for i, q in enumerate(query):
            scores = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(width) for k in key]
            attended[i] += weighted(softmax(scores), value)
    result = []
    for instance, row in zip(bag, attended, strict=True):
        middle = [x + y for x, y in zip(instance, linear(state, f"{name}.projection", row), strict=True)]
        hidden = linear(state, f"{name}.mlp.1", layer_norm(state, f"{name}.mlp.0", middle))
        gelu = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in hidden]
        result.append([x + y for x, y in zip(middle, linear(state, f"{name}.mlp.3", gelu), strict=True)])
    return result


def max_(state, bag, options):
    logits = [linear(state, "instance_classifier", h)[0] for h in bag]
    return max(sigmoid(z) for z in logits), logits, None


def top_k(state, bag, options):
    logits = [linear(state, "instance_classifier", h)[0] for h in bag]
    count = 1  # the smallest whole number of instances that is at least the ratio of them
    while count * 1000 < round(options.get("ratio", 0.1) * 1000) * len(bag):
        count += 1
    return sum(sorted(map(sigmoid, logits), reverse=True)[:count]) / count, logits, None


def smooth_max(state, bag, options):
    logits = [linear(state, "instance_classifier", h)[0] for h in bag]
    beta = options.get("sharpness", 1.0)
    return sigmoid(math.log(sum(math.exp(beta * z) for z in logits)) / beta), logits, None


def log_mean_exp(state, bag, options):
    centre, scale = state["centre"].tolist(), state["scale"].tolist()
    standardised = [[(x - m) / s for x, m, s in zip(h, centre, scale, strict=True)] for h in bag]
    logits = [linear(state, "instance_classifier", h)[0] for h in standardised]
    beta = options.get("sharpness", 1.0)
    return sigmoid(math.log(sum(math.exp(beta * z) for z in logits) / len(bag)) / beta), logits, None


def attention_mil(state, bag, options):
    for layer in range(len(options.get("embedding", []))):  # linear, ReLU and dropout, after a first dropout
        bag = [[max(x, 0.0) for x in linear(state, f"embedding.{1 + 3 * layer}", h)] for h in bag]
    weights = attention(state, bag)
    logits = [linear(state, "bag_classifier", h)[0] for h in bag]
    return sigmoid(linear(state, "bag_classifier", weighted(weights, bag))[0]), logits, weights


def instance_attention(state, bag, options):
    weights = attention(state, bag)
    logits = [linear(state, "instance_classifier", h)[0] for h in bag]
    return sum(a * sigmoid(z) for a, z in zip(weights, logits, strict=True)), logits, weights


def dsmil_streams(state, bag, options):
    """Logits of the embedding stream and the max stream, instance logits, attention."""

    def query(instance):
        if not options.get("nonlinear", True):
            return linear(state, "query", instance)
        hidden = [max(0.0, x) for x in linear(state, "query.0", instance)]
        return [math.tanh(x) for x in linear(state, "query.2", hidden)]

    logits = [linear(state, "instance_classifier", h)[0] for h in bag]
    critical = query(bag[logits.index(max(logits))])
    weights = softmax([sum(a * b for a, b in zip(query(h), critical, strict=True)) / math.sqrt(128) for h in bag])
    values = bag
    if options.get("passing_value", False):
        values = [[max(0.0, x) for x in linear(state, "value.1", h)] for h in bag]
    return linear(state, "bag_classifier", weighted(weights, values))[0], max(logits), logits, weights


def dsmil(state, bag, options):
    embedding, maximum, logits, weights = dsmil_streams(state, bag, options)
    bag = embedding if options.get("prediction") == "embedding" else (embedding + maximum) / 2
    return sigmoid(bag), logits, weights


def transformer(state, bag, options):
    for block in range(options.get("blocks", 2)):
        bag = transformer_block(state, f"blocks.{block}", bag, options.get("heads", 8))
    return attention_mil(state, bag, options)


REFERENCES = {
    "max": max_,
    "top_k": top_k,
    "smooth_max": smooth_max,
    "log_mean_exp": log_mean_exp,
    "attention": attention_mil,
    "instance_attention": instance_attention,
    "dsmil": dsmil,
    "transformer": transformer,
}
