"""Names of other libraries, and what to write here: one table, for errors and for the page docs/coming_from.md.

A row has names as they are written there (settings with the class or function that has them), the functions here that
answer such a setting, and the answer: code, perhaps with an explanation after a
semicolon, or a sentence after `none:`. `tests/test_other_names.py` tries all names, checks that the code of answers
fits the functions here, and writes the tables of the page.
"""

import functools
import re
from collections.abc import Collection
from typing import NamedTuple


_COMPOSER_METHODS = """
MixUp(input_key=) | FIELDS augmix cutout randaugment | input_field=0; by default that of the state
MixUp(target_key=) | FIELDS label_smoothing | target_field=1; by default that of the state
Alibi(max_sequence_length=) | alibi | none: there is no limit
ColOut(batch=) | colout | pc.functional.sample_transform(pc.functional.colout_batch); for batch=False
EMA(ema_start=) | ema | start=0.5
EMA(update_interval=) | ema | every="10ba"
FusedLayerNorm(optimizers=) | fused_layernorm | none: the optimizer of the state follows
GradientClipping(clipping_type=) | gradient_clipping | pc.algorithms.gradient_clipping("norm", 1.0)
GradientClipping(fsdp_enabled=) | gradient_clipping | none: it recognises gradients that are divided among processes
LowPrecisionLayerNorm(apply_at=) | low_precision_layernorm low_precision_groupnorm | none: it acts at INIT
SAM(interval=) | sam | every=10
SAMOptimizer(base_optimizer=) | sam | none: it acts around the optimizer of the state
SelectiveBackprop(interrupt=) | selective_backprop | full_every=2
StochasticDepth(target_layer_name=) | stochastic_depth | none: it finds the blocks
SWA(swa_start=) | swa | start=0.7
SWA(swa_end=) | swa | end=0.97
SWA(update_interval=) | swa | every="1ep"
SWA(schedule_swa_lr=) | swa | swa_lr=0.05; without it the rate follows its schedule
"""

_COMPOSER_FUNCTIONS = """
AGC, apply_agc | pc.algorithms.gradient_clipping("adaptive", 0.01); a function: pc.functional.clip_adaptively
RandAugmentTransform, randaugment_image | pc.functional.sample_transform(pc.functional.randaugment_batch, severity=9)
AugmentAndMixTransform, augmix_image | pc.functional.sample_transform(pc.functional.augmix_batch, severity=3)
ColOutTransform | pc.functional.sample_transform(pc.functional.colout_batch)
apply_alibi | pc.functional.apply_surgery(net, pc.algorithms.alibi())
apply_blurpool | pc.functional.apply_surgery(net, pc.algorithms.blurpool()); it returns a copy
apply_channels_last | net.to(memory_format=torch.channels_last)
apply_factorization | pc.functional.apply_surgery(net, pc.algorithms.factorize())
apply_fused_layernorm | pc.functional.apply_surgery(net, pc.algorithms.fused_layernorm())
apply_gated_linear_units | pc.functional.apply_surgery(net, pc.algorithms.gated_linear_units())
apply_ghost_batchnorm | pc.functional.apply_surgery(net, pc.algorithms.ghost_batchnorm())
apply_gradient_clipping | pc.functional.clip_by_norm; also clip_by_value and clip_adaptively
apply_gyro_dropout | pc.functional.gyro_dropout_mask
apply_low_precision_groupnorm | pc.functional.apply_surgery(net, pc.algorithms.low_precision_groupnorm())
apply_low_precision_layernorm | pc.functional.apply_surgery(net, pc.algorithms.low_precision_layernorm())
apply_squeeze_excite | pc.functional.apply_surgery(net, pc.algorithms.squeeze_excite())
apply_stochastic_depth | pc.functional.apply_surgery(net, pc.algorithms.stochastic_depth())
apply_weight_standardization | pc.functional.apply_surgery(net, pc.algorithms.weight_standardization())
apply_surgery(optimizers=) | apply_surgery | none: create the optimizer from the copy that it returns
mixup_batch(input=) | mixup_batch cutmix_batch resize_batch select_using_loss | inputs=inputs; a key comes first
cutout_batch(input=) | cutout_batch | images=images; a key comes first
mixup_batch(target=) | mixup_batch cutmix_batch resize_batch select_using_loss smooth_labels | targets=targets
cutmix_batch(length=) | cutmix_batch | bbox=(0, 0, 16, 16); or cutmix_box
colout_batch(sample=) | colout_batch | inputs=inputs; a key comes first
compute_ema(model=) | compute_ema | weights=weights; by name
compute_ema(ema_model=) | compute_ema | averages=averages; it returns the new ones
freeze_layers | pc.functional.frozen_layers
select_using_loss(model=) | select_using_loss | forward_fn=net
select_using_loss(loss_fun=) | select_using_loss | loss_fn=cross_entropy
set_batch_sequence_length(curr_seq_len=) | set_batch_sequence_length | length=64
should_selective_backprop | pc.between(0.5, 0.9)
"""

_COMPOSER_CLASSES = """
StepScheduler | pc.schedule.step
MultiStepScheduler, MultiStepWithWarmupScheduler | pc.schedule.multi_step
ConstantScheduler, ConstantWithWarmupScheduler | pc.schedule.constant
LinearScheduler, LinearWithWarmupScheduler | pc.schedule.linear
ExponentialScheduler | pc.schedule.exponential
PolynomialScheduler, PolynomialWithWarmupScheduler | pc.schedule.polynomial
CosineAnnealingScheduler, CosineAnnealingWithWarmupScheduler | pc.schedule.cosine
CosineAnnealingWarmRestartsScheduler | pc.schedule.cosine_warm_restarts
CosineAnnealingWithWarmupScheduler(t_warmup=) | SCHEDULES | warmup="1ep"
CosineAnnealingWithWarmupScheduler(scale_warmup=) | SCHEDULES | pc.schedule.scaled(scale_warmup=True)
ComposerModel, ComposerClassifier, HuggingFaceModel | pc.State.create; a network, and a loss beside it
DataSpec | pc.batch.Splitter; for State.create(splitter=), if a batch has no dimension of examples
Time | pc.time.Time
EarlyStopper | pc.EarlyStopping
EarlyStopper(monitor=) | EarlyStopping Threshold ReduceOnPlateau | metric="eval/loss"
EarlyStopper(comp=) | EarlyStopping Threshold | mode="min"
EarlyStopper(dataloader_label=) | EarlyStopping Threshold | metric="eval/loss"
ThresholdStopper | pc.Threshold
ThresholdStopper(threshold=) | Threshold | value=0.1
ThresholdStopper(stop_on_batch=) | Threshold | none: it reads a metric as often as it is measured
CheckpointSaver | pc.Checkpoints
LRMonitor | pc.observers.learning_rate
SpeedMonitor, RuntimeEstimator | pc.observers.speed; it has time/left
SpeedMonitor(window_size=) | speed | window=100
MemoryMonitor | pc.observers.memory
OptimizerMonitor | pc.algorithms.gradient_norm(each=True); also pc.observers.updates
NaNMonitor | pc.observers.NaNs
ImageVisualizer | pc.observers.image_samples
Generate | pc.observers.text_samples
ProgressBarLogger, ConsoleLogger | pc.observers.Progress
FileLogger | pc.observers.Records("run.jsonl")
InMemoryLogger | pc.observers.History
MLFlowLogger | pc.observers.MLflow
Profiler, JSONTraceHandler | pc.observers.Profile
MIoU | pc.metrics.iou
Dice, MAP, BinaryF1Score | pc.metrics.from_torchmetrics
LossMetric, LanguageCrossEntropy | pc.metrics.mean_loss
LanguagePerplexity | pc.metrics.perplexity
MaskedAccuracy | pc.metrics.top_k(1, ignore_index=-100)
soft_cross_entropy | pc.losses.cross_entropy
binary_cross_entropy_with_logits | pc.losses.BinaryCrossEntropy(mean_over="examples")
DiceLoss | pc.State.create(loss=dice); any function (outputs, targets) is a loss
"""

_COMPOSER_TRAINER = """
Trainer | pc.fit(step, state, train)
Trainer(max_duration=) | RUN | pc.State.create(duration="20ep")
Trainer(algorithms=) | RUN | pc.compose([pc.algorithms.mixup()]); or methods= of pc.train
Trainer(algorithm_passes=) | RUN | pc.compose(passes=[sort_first, *pc.DEFAULT_PASSES])
Trainer(optimizers=, schedulers=) | RUN | pc.State.create(optimizer=pc.optim.sgd(0.1 * pc.schedule.cosine()))
Trainer(step_schedulers_every_batch=) | RUN | none: schedules move with every batch
Trainer(train_dataloader=) | RUN | pc.fit(data=train)
Trainer(train_subset_num_batches=) | RUN | pc.State.create(batches_per_epoch=100)
Trainer(train_dataloader_label=) | RUN | none: metrics of training begin with train/
Trainer(spin_dataloaders=) | RUN | none: data keep their position
Trainer(eval_dataloader=) | LOOP | pc.fit(evaluate=pc.Evaluator(test, metrics))
Trainer(eval_interval=) | RUN Evaluator | pc.Evaluator(every="2ep")
Trainer(eval_subset_num_batches=) | RUN | pc.Evaluator(num_batches=10)
Evaluator(dataloader=) | Evaluator evaluate predict | data=test
Evaluator(metric_names=) | Evaluator evaluate | metrics=["accuracy"]
Evaluator(subset_num_batches=) | Evaluator evaluate | num_batches=10
Evaluator(device_eval_microbatch_size=) | Evaluator evaluate | none: evaluate smaller batches
Trainer.eval(eval_dataloader=) | evaluate | data=test
Trainer.predict(return_outputs=) | predict | none: it returns the outputs; for metrics, pc.evaluate
Trainer(callbacks=, loggers=) | RUN | pc.fit(observers=[pc.observers.Progress()]); also stop=, adjust= and checkpoints=
Trainer(progress_bar=, log_to_console=) | RUN | pc.fit(observers=[pc.observers.Progress()])
Trainer(log_traces=) | RUN | pc.traced(step)
Trainer(run_name=) | RUN | pc.Checkpoints("runs/first"); or the folder of pc.records
Trainer(load_path=, autoresume=) | RUN | pc.fit(resume="auto")
Trainer(load_weights_only=, load_strict_model_weights=) | RUN load | pc.saving.load_weights(strict=False)
Trainer(load_ignore_keys=, load_exclude_algorithms=) | RUN load | pc.load(ignore=["slots.ema.*"])
Trainer(save_folder=, save_interval=) | RUN Checkpoints | pc.Checkpoints("run", every="1ep")
Trainer(save_num_checkpoints_to_keep=) | RUN Checkpoints | pc.Checkpoints(keep=3)
Trainer(save_filename=, save_latest_filename=) | RUN Checkpoints | none: its folders have the time in their names
Trainer(save_overwrite=) | RUN Checkpoints | none: a folder with a later run is refused, unless fit resumes it
Trainer(save_weights_only=) | RUN Checkpoints save | pc.saving.save_weights
Trainer(save_ignore_keys=) | RUN Checkpoints save | pc.save(parts="trainable")
Trainer(save_metrics=) | RUN Checkpoints | none: a state has its metrics
Trainer(scale_schedule_ratio=) | RUN | pc.algorithms.scale_schedule(state, 0.5)
Trainer(seed=) | RUN | pc.State.create(key=3)
Trainer(precision_config=) | RUN | pc.State.create(precision="bf16")
Trainer(deterministic_mode=) | RUN | torch.use_deterministic_algorithms(True)
Trainer(device_train_microbatch_size=) | RUN | pc.compose(microbatch_size=16); "auto" is of pc.fit(microbatches=)
Trainer(accumulate_train_batch_on_tokens=) | RUN | none: slices are weighted by the terms of the loss
Trainer(compile_config=) | RUN | pc.compile(step)
Trainer(profiler=) | RUN | pc.fit(observers=[pc.observers.Profile("trace")])
Trainer(parallelism_config=, ddp_sync_strategy=) | RUN | pc.fully_sharded(step, mesh); or pc.data_parallel(step)
Trainer.fit(reset_time=) | RUN | none: make a new state of the weights
export_for_inference | pc.saving.export_onnx
"""

_LIGHTNING = """
LightningModule | pc.State.create; a network, and a loss beside it
LightningDataModule | pc.data.loader(dataset, 64); any iterable of batches
ModelCheckpoint | pc.Checkpoints
ModelCheckpoint(monitor=) | Checkpoints | best="eval/accuracy"
ModelCheckpoint(dirpath=) | Checkpoints | folder="run"
ModelCheckpoint(every_n_epochs=, every_n_train_steps=) | Checkpoints | every="500ba"
ModelPruning | pc.to_module(state); torch.nn.utils.prune works on it
ModelCheckpoint(save_top_k=) | Checkpoints | keep_best=3; keep is the number of newest ones
ModelCheckpoint(save_last=) | Checkpoints | none: the newest one always stays
LearningRateMonitor | pc.observers.learning_rate
DeviceStatsMonitor, SystemMetricsMonitor | pc.observers.memory
RichProgressBar, TQDMProgressBar | pc.observers.Progress
ModelSummary | pc.surgery.summary
CSVLogger | pc.observers.CSV("metrics.csv")
TensorBoardLogger | pc.observers.TensorBoard
WandbLogger | pc.observers.WandB
StochasticWeightAveraging | pc.algorithms.swa
WeightAveraging, EMAWeightAveraging | pc.algorithms.ema
BaseFinetuning, BackboneFinetuning | pc.algorithms.layer_freezing; or state.replace(frozen=["backbone.*"])
GradientAccumulationScheduler | pc.algorithms.gradient_accumulation
Trainer(max_epochs=, max_steps=) | RUN | pc.State.create(duration="20ep"); steps as "500up"
Trainer(max_time=) | RUN | pc.fit(duration="30m")
Trainer(gradient_clip_val=) | RUN | pc.algorithms.gradient_clipping("norm", 1.0)
Trainer(accumulate_grad_batches=) | RUN | pc.algorithms.gradient_accumulation(4)
Trainer(limit_train_batches=) | RUN | pc.State.create(batches_per_epoch=100)
Trainer(limit_val_batches=) | RUN | pc.Evaluator(num_batches=10)
Trainer(check_val_every_n_epoch=, val_check_interval=) | RUN Evaluator | pc.Evaluator(every="2ep")
Trainer(log_every_n_steps=) | RUN | pc.observers.Records("run.jsonl", every="50ba")
Trainer(fast_dev_run=) | RUN | pc.fit(duration="1ba")
Trainer(overfit_batches=) | RUN | pc.fit(data=list(train)[:10])
Trainer(ckpt_path=) | RUN | pc.fit(resume="auto")
Trainer(train_dataloaders=) | RUN | pc.fit(data=train)
Trainer(val_dataloaders=) | LOOP | pc.fit(evaluate=pc.Evaluator(test, metrics))
Trainer(logger=, enable_progress_bar=) | RUN | pc.fit(observers=[pc.observers.Progress()])
Trainer(enable_checkpointing=, default_root_dir=) | RUN | pc.Checkpoints("run")
Trainer(accelerator=) | RUN | pc.State.create(device="cuda")
Trainer(strategy=, devices=) | RUN | pc.data_parallel(step); started by torchrun
Trainer(deterministic=) | RUN | torch.use_deterministic_algorithms(True)
Trainer(detect_anomaly=) | RUN | pc.fit(observers=[pc.observers.NaNs()]); torch.autograd.set_detect_anomaly
Trainer(num_sanity_val_steps=) | RUN | none: call pc.evaluate before training
seed_everything | pc.State.create(key=0)
save_checkpoint | pc.save(state, path)
load_checkpoint | pc.load(path, like=state)
Precision, Recall, AUROC, AveragePrecision | pc.metrics.from_torchmetrics; objects of torchmetrics may be in metrics=
load_from_checkpoint | pc.load(path, like=state)
load_from_checkpoint(map_location=) | load | like=state; with its device
"""

_KERAS = """
Model, Sequential | pc.State.create; of any nn.Module
Model.compile(metrics=) | RUN | pc.Evaluator(metrics=["accuracy"])
Model.compile(optimizer=, loss=, metrics=) | compile | none: it compiles a step; give them to pc.train
Model.compile(weighted_metrics=) | RUN | pc.metrics.weighted("accuracy")
Model.fit(x=, y=, batch_size=) | RUN | pc.data.arrays(x, y, 64)
Model.fit(epochs=) | RUN | pc.State.create(duration="3ep")
Model.fit(initial_epoch=) | RUN | none: the state knows its epoch
Model.fit(steps_per_epoch=) | RUN | pc.State.create(batches_per_epoch=100)
Model.fit(validation_data=) | LOOP | pc.fit(evaluate=pc.Evaluator(test, metrics))
Model.fit(validation_data=, val_dataloaders=, eval_dataloader=, eval_dataset=) | train | test=test
Model.fit(validation_freq=) | RUN Evaluator | pc.Evaluator(every="2ep")
Model.fit(validation_steps=) | RUN | pc.Evaluator(num_batches=10)
Model.fit(validation_split=) | RUN | pc.data.split(x, y, 0.2, seed=0)
Model.fit(shuffle=) | RUN | pc.data.arrays(x, y, 64, shuffle=False)
Model.fit(verbose=) | RUN | pc.fit(observers=[pc.observers.Progress()])
Model.fit(class_weight=) | RUN | pc.losses.CrossEntropy(weight=[1.0, 5.0])
Model.fit(sample_weight=) | RUN | pc.State.create(weight_field=2)
SparseCategoricalCrossentropy, CategoricalCrossentropy | pc.losses.cross_entropy; of logits
BinaryCrossentropy | pc.losses.binary_cross_entropy; of logits
CategoricalFocalCrossentropy | pc.losses.Focal(); of logits
BinaryFocalCrossentropy | pc.losses.BinaryFocal(); of logits
MeanSquaredError | pc.losses.mse
SparseCategoricalAccuracy, CategoricalAccuracy | pc.metrics.accuracy
BinaryAccuracy | pc.metrics.binary_accuracy
F1Score | pc.metrics.f1(10)
MeanAbsoluteError | pc.metrics.mae
TopKCategoricalAccuracy, SparseTopKCategoricalAccuracy | pc.metrics.top_k(5)
CosineDecay | pc.schedule.cosine
CosineDecayRestarts | pc.schedule.cosine_warm_restarts
ExponentialDecay | pc.schedule.exponential
PolynomialDecay | pc.schedule.polynomial
PiecewiseConstantDecay | pc.schedule.multi_step
LearningRateScheduler | pc.schedule.scheduled
BackupAndRestore | pc.fit(resume="auto")
history, plot | history.series("loss"); plt.plot(*history.series("loss")) draws it
TerminateOnNaN | pc.observers.NaNs
ModelCheckpoint(filepath=) | Checkpoints | folder="run"
ModelCheckpoint(save_best_only=) | Checkpoints | best="eval/accuracy"
ModelCheckpoint(save_freq=) | Checkpoints | every="500ba"
EarlyStopping(restore_best_weights=) | EarlyStopping | pc.fit(result="best")
ReduceLROnPlateau(min_lr=) | ReduceOnPlateau | minimum=1e-6
Adam(learning_rate=) | OPTIMIZERS | lr=0.1
Adam(epsilon=) | adam adamw decoupled_adamw adafactor muon rmsprop | eps=1e-7
Adam(beta_1=, beta_2=) | adam adamw decoupled_adamw lion | betas=(0.9, 0.999)
Adam(global_clipnorm=, clipnorm=) | OPTIMIZERS | pc.algorithms.gradient_clipping("norm", 1.0)
Adam(clipvalue=) | OPTIMIZERS | pc.algorithms.gradient_clipping("value", 0.5)
Adam(use_ema=, ema_momentum=) | OPTIMIZERS | pc.algorithms.ema(smoothing=0.99)
Adam(gradient_accumulation_steps=) | OPTIMIZERS RUN | pc.algorithms.gradient_accumulation(4)
set_random_seed | pc.State.create(key=0)
"""

_TORCH = """
DataLoader | pc.data.loader(dataset, 64)
DataLoader(drop_last=, shuffle=) | buckets | pc.data.loader(dataset, buckets, drop_last=True)
DataLoader(num_workers=) | loader | workers=4
DataLoader(collate_fn=) | loader | collate=collate
DataLoader(sampler=, batch_sampler=) | loader | pc.fit(data=batches); a DataLoader is data, too
TensorDataset | pc.data.arrays(x, y, 64)
CrossEntropyLoss | pc.losses.cross_entropy
BCEWithLogitsLoss, BCELoss, BCE | pc.losses.binary_cross_entropy; of logits
FocalLoss, sigmoid_focal_loss | pc.losses.Focal(); or BinaryFocal
FocalLoss(weight=) | Focal | alpha=[1.0, 5.0]
CrossEntropyLoss(class_weight=, weights=) | CrossEntropy | weight=[1.0, 5.0]
BCEWithLogitsLoss(weight=) | BinaryCrossEntropy | pos_weight=5.0
MSELoss, MSE | pc.losses.mse
CTCLoss | pc.losses.ctc
NAdam, RAdam, Adamax | pc.optim.from_torch(torch.optim.NAdam, lr=0.1)
Adam(params=) | OPTIMIZERS | none: an optimizer takes no parameters, pc.State.create has the network
Adam(fused=, foreach=, capturable=) | OPTIMIZERS | none: pc.compile(step) joins the operations
StepLR | pc.schedule.step
MultiStepLR | pc.schedule.multi_step
LambdaLR | pc.schedule.scheduled
LinearLR | pc.schedule.linear
ConstantLR | pc.schedule.constant
ExponentialLR | pc.schedule.exponential
PolynomialLR | pc.schedule.polynomial
CosineAnnealingLR | pc.schedule.cosine
CosineAnnealingWarmRestarts | pc.schedule.cosine_warm_restarts
OneCycleLR | pc.schedule.one_cycle
SequentialLR | pc.schedule.sequence
ReduceLROnPlateau | pc.ReduceOnPlateau
CosineAnnealingLR(T_max=, total_iters=) | linear cosine one_cycle polynomial | t_max="20ep"
CosineAnnealingLR(eta_min=) | linear cosine cosine_warm_restarts polynomial | alpha_f=0.1; a share of the rate
CosineAnnealingLR(last_epoch=) | SCHEDULES | none: the state knows its time
ReduceLROnPlateau(threshold=) | ReduceOnPlateau | min_delta=1e-4
AveragedModel | pc.algorithms.ema; or swa
EMA(decay=, beta=, momentum=) | ema | smoothing=0.999
Mixup(prob=, p=) | mixup cutmix cutout colout randaugment augmix | pc.algorithms.sometimes(method, 0.5)
Mixup(mixup_alpha=, cutmix_alpha=, beta=) | mixup cutmix | alpha=0.2
RandAugment(magnitude=) | randaugment augmix | severity=9
RandAugment(num_ops=) | randaugment | depth=2
Cutout(size=) | cutout | length=16
CrossEntropyLoss(label_smoothing=, epsilon=) | label_smoothing | smoothing=0.1
GradScaler | pc.algorithms.loss_scaling
clip_grad_norm_(max_norm=, clip_norm=) | gradient_clipping | pc.algorithms.gradient_clipping("norm", 1.0)
clip_grad_norm_ | pc.algorithms.gradient_clipping("norm", 1.0)
DistributedDataParallel | pc.data_parallel(step)
fully_shard, FullyShardedDataParallel | pc.fully_sharded(step, mesh)
compile(fullgraph=) | compile | none: fallback=False refuses steps that are not compiled
compile(microbatches=) | compile | pc.compose(microbatches=4)
"""

_TRANSFORMERS = """
TrainingArguments | pc.State.create; and arguments of pc.fit
TrainingArguments(num_train_epochs=) | RUN | pc.State.create(duration="3ep")
TrainingArguments(learning_rate=, lr=) | RUN | pc.State.create(optimizer=pc.optim.adamw(1e-3))
TrainingArguments(lr_scheduler_type=, warmup_steps=, warmup_ratio=) | RUN | pc.schedule.linear(warmup="0.1dur")
TrainingArguments(max_grad_norm=) | RUN | pc.algorithms.gradient_clipping("norm", 1.0)
TrainingArguments(label_smoothing_factor=) | RUN | pc.algorithms.label_smoothing(0.1)
TrainingArguments(per_device_train_batch_size=, train_batch_size=) | RUN | pc.data.loader(dataset, 64)
TrainingArguments(group_by_length=, length_column_name=) | RUN | pc.data.buckets(lengths, batch_size=32)
TrainingArguments(eval_strategy=, eval_steps=) | RUN Evaluator | pc.Evaluator(every="500ba")
TrainingArguments(save_strategy=, save_steps=) | RUN Checkpoints | pc.Checkpoints(every="500ba")
TrainingArguments(save_total_limit=) | RUN Checkpoints | pc.Checkpoints(keep=3)
TrainingArguments(load_best_model_at_end=) | RUN | pc.fit(result="best")
TrainingArguments(metric_for_best_model=) | RUN Checkpoints | pc.Checkpoints(best="eval/accuracy")
TrainingArguments(logging_steps=, report_to=) | RUN | pc.fit(observers=[pc.observers.TensorBoard("logs")])
DataCollatorWithPadding, LengthGroupedSampler | pc.data.buckets(lengths, batch_size=32)
TrainingArguments(bf16=, fp16=) | RUN | pc.State.create(precision="bf16")
TrainingArguments(gradient_checkpointing=) | RUN | pc.nn.layers.checkpoint
Trainer(train_dataset=) | RUN | pc.fit(data=train)
Trainer(eval_dataset=) | LOOP | pc.fit(evaluate=pc.Evaluator(test, metrics))
Trainer(compute_metrics=) | RUN | pc.Evaluator(metrics=["accuracy"])
Trainer.train(resume_from_checkpoint=) | RUN | pc.fit(resume="auto")
EarlyStoppingCallback | pc.EarlyStopping
EarlyStoppingCallback(early_stopping_patience=) | EarlyStopping | patience="3ep"
EarlyStoppingCallback(early_stopping_threshold=) | EarlyStopping | min_delta=0.01
TrainerCallback, Callback, callbacks | pc.Algorithm; a function (event, state) in fit(observers=) if it only reads
get_cosine_schedule_with_warmup | pc.schedule.cosine(warmup="500ba")
get_linear_schedule_with_warmup | pc.schedule.linear(warmup="500ba")
"""

TABLES: dict[str, str] = {
    "Composer: methods": _COMPOSER_METHODS,
    "Composer: functions": _COMPOSER_FUNCTIONS,
    "Composer: classes": _COMPOSER_CLASSES,
    "Composer: trainer": _COMPOSER_TRAINER,
    "Lightning": _LIGHTNING,
    "Keras": _KERAS,
    "PyTorch": _TORCH,
    "Hugging Face's Trainer": _TRANSFORMERS,
}
"""The rows, by the tables of docs/coming_from.md."""

_GROUPS = {
    "FIELDS": "mixup cutmix colout progressive_resizing selective_backprop",
    "RUN": "fit training train State.create compose",
    "LOOP": "fit training State.create compose",  # `train` has another answer
    "OPTIMIZERS": "sgd adam adamw adafactor adagrad sparse_adam decoupled_sgdw decoupled_adamw lion muon rmsprop",
    "SCHEDULES": "constant linear cosine cosine_warm_restarts exponential multi_step polynomial step",
}


class Row(NamedTuple):
    theirs: str
    """The text of its first cell."""
    names: tuple[str, ...]
    where: tuple[str, ...]
    """Functions here that answer the settings; empty for names of classes and functions."""
    answer: str


def rows(table: str) -> tuple[Row, ...]:
    found = list[Row]()
    for line in table.strip().splitlines():
        theirs, *where, answer = line.split(" | ")
        functions = [function for group in " ".join(where).split() for function in _GROUPS.get(group, group).split()]
        names = re.findall(r"(\w+)=", theirs) if functions else theirs.split(", ")
        found.append(Row(theirs, tuple(names), tuple(functions), answer))
    return tuple(found)


def instead_of_setting(function: str, name: str, own: Collection[str] = ()) -> str:
    """Return a hint, such as ' write every=10', for a setting that a function does not have; "" if nothing is known.

    An answer that is one of the function's `own` settings is written without another function.
    """
    answer = _settings().get((function, name), "")
    code, *rest = re.split("(?=;)", answer, maxsplit=1)
    call = re.fullmatch(r"pc\.([\w.]+)\(((\w+)=.*)\)", code)
    is_own = call and function in (call[1], "train") and call[3] in own
    return f" write {call[2]}{''.join(rest)}" if call and is_own else _hint(answer)


def instead_of_name(name: str) -> str:
    """Return a hint for a class or function of another library, in any capitals and underscores; "" if unknown."""
    return _hint(_names().get(_key(name), ""))


def _hint(answer: str) -> str:
    reason = answer.removeprefix("none: ")
    return f" it does not exist here: {reason}" if reason != answer else answer and f" write {answer}"


@functools.cache
def _settings() -> dict[tuple[str, str], str]:
    found = [row for table in TABLES.values() for row in rows(table)]
    return {(function, name): row.answer for row in found for function in row.where for name in row.names}


@functools.cache
def _names() -> dict[str, str]:
    found = [row for table in TABLES.values() for row in rows(table) if not row.where]
    return {_key(name): row.answer for row in found for name in row.names}


def _key(name: str) -> str:
    return name.replace("_", "").lower()
