"""The GPU code of a training step, written, checked and run on a machine without a GPU.

Inductor writes the Triton kernels and library calls of a step for an H100 whose driver is a stand-in. `report` counts
kernels, bytes and peak memory, and predicts times by a written model, for the step and for the loop that people write
and compile; `code` prints the source. `assemble` compiles every kernel to machine code. `shipped` tries everything that
ships, in small steps (`trials`): it checks rules for their code (`rules`), assembles it, runs it on the CPU, kernels in
Triton's interpreter, and compares the numbers with those of the eager step (`numbers`). `faults` shows that this would
find a wrong alias, order or draw. All trials take about two hours on two cores; a record lets them run in parts.

    bash benchmarks/gpu_code/run report mlp gpt resnet18 --methods plain sam
    bash benchmarks/gpu_code/run faults "method mixup vectors"
    bash benchmarks/gpu_code/run assemble mlp
    bash benchmarks/gpu_code/run code mlp
    bash benchmarks/gpu_code/run shipped "method mixup*" "loss *" --record proofs.jsonl

None of them tells what needs a GPU: real bandwidth and launch times, and which kernels cuBLAS and cuDNN choose.
"""
