//! The leader's side of the protocol, with a thread in the GPU's place and plain memory for the slots.

use std::os::unix::thread::JoinHandleExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::leader::{Leader, LeaderOptions};
use super::mailbox::{ECHO_LAYER, Mailbox, SLOTS};
use super::slot::{Slot, SlotLayout};
use crate::Dtype;
use crate::engine::{Engine, EngineOptions};
use crate::fault::Fault;
use crate::format::WeightFormat;
use crate::kernel::{Activation, ActivationParams};
use crate::mem::LazyBuffer;
use crate::moe::{Layer, LayerSpec, StepInput};
use crate::topology::{NodeId, NodePlan, Topology, WorkerPlan, WorkerSlot};

const HIDDEN: usize = 64;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const CAPACITY: usize = 8;
/// No answer after this long is a hang.
const HANG: Duration = Duration::from_secs(60);

fn engine(options: &EngineOptions) -> Arc<Engine> {
    let cpus: Vec<_> = Topology::detect(None)
        .unwrap()
        .nodes
        .iter()
        .flat_map(|n| &n.cores)
        .flat_map(|c| c.cpus.clone())
        .collect();
    let workers = vec![WorkerSlot { cpus: cpus.clone() }, WorkerSlot { cpus }];
    let plan = WorkerPlan { nodes: vec![NodePlan { node: NodeId(0), workers }], notes: Vec::new() };
    Engine::with_plan(plan, options).unwrap()
}

fn layer(engine: &Engine, index: usize) -> Arc<Layer> {
    let spec = LayerSpec {
        name: format!("model.layers.{index}.mlp.experts"),
        format: WeightFormat::from_dtype(Dtype::F32).unwrap(),
        num_experts: EXPERTS,
        hidden_size: HIDDEN,
        intermediate_size: 32,
        top_k: TOP_K,
        dtype: Dtype::F32,
        activation: Activation::parse("silu", ActivationParams::default()).unwrap(),
        interleaved: false,
        w13_bias: false,
        w2_bias: false,
        router_weight_on_input: false,
    };
    let layer = engine.create_layer(spec).unwrap();
    layer.fill_dummy(index as u64 + 1).unwrap();
    layer.seal().unwrap();
    layer
}

/// Everything but the GPU.
struct House {
    engine: Arc<Engine>,
    mailbox: Arc<Mailbox>,
    leader: Leader,
    layers: Vec<Arc<Layer>>,
}

impl House {
    fn new(options: &EngineOptions, waits: LeaderOptions) -> Self {
        let engine = engine(options);
        let layout = SlotLayout::new(CAPACITY, HIDDEN * 4, TOP_K).unwrap();
        let memory = LazyBuffer::new(SLOTS * layout.bytes).unwrap();
        let base = NonNull::new(memory.as_ptr()).unwrap();
        // SAFETY: zeroed, page-aligned, of that size, owned by the mailbox.
        let mailbox = unsafe { Mailbox::new(base, layout, Box::new(memory), 3) };
        mailbox.watch(&engine);
        let layers: Vec<_> = (0..2).map(|i| layer(&engine, i)).collect();
        for (number, layer) in layers.iter().enumerate() {
            assert_eq!(mailbox.add_layer(Arc::clone(layer), None).unwrap(), number as u32);
        }
        let cpus = engine.plan().nodes[0].workers[0].cpus.clone();
        let (leader, note) = Leader::start(&engine, Arc::clone(&mailbox), cpus, waits).unwrap();
        assert_eq!(note, None);
        Self { engine, mailbox, leader, layers }
    }

    fn gpu(&self) -> FakeGpu<'_> {
        FakeGpu { mailbox: &self.mailbox, epochs: [0; SLOTS] }
    }
}

/// Does what the kernels do, in their order.
struct FakeGpu<'a> {
    mailbox: &'a Mailbox,
    epochs: [u64; SLOTS],
}

#[derive(Debug, Clone)]
struct Rows {
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Rows {
    /// Random numbers of a seed; `live` says whether ids name experts.
    fn new(seed: u64, rows: usize, live: bool) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as u32
        };
        let x = (0..rows * HIDDEN).map(|_| next() as f32 / (1 << 23) as f32 - 1.0).collect();
        let ids =
            (0..rows * TOP_K).map(|_| if live { (next() as usize % EXPERTS) as i32 } else { -1 }).collect();
        let weights = (0..rows * TOP_K).map(|_| next() as f32 / (1 << 24) as f32).collect();
        Self { x, ids, weights }
    }

    fn rows(&self) -> usize {
        self.x.len() / HIDDEN
    }

    fn bytes(&self) -> Vec<u8> {
        self.x.iter().flat_map(|v| v.to_ne_bytes()).collect()
    }
}

impl FakeGpu<'_> {
    fn slot(&self, layer: u32) -> (usize, &Slot) {
        self.mailbox.slot_of(layer)
    }

    /// As `lk_send`; `lost` epochs are counted and never shown.
    fn send(&mut self, slot_layer: u32, layer: u32, rows: &Rows, lost: u64) -> u64 {
        let (index, slot) = self.slot(slot_layer);
        let (layout, n) = (*slot.layout(), rows.rows());
        let at = |offset: usize| slot.base().as_ptr().wrapping_add(offset);
        // SAFETY: the parts hold CAPACITY rows; nobody reads them before the epoch is released below.
        unsafe {
            std::ptr::copy_nonoverlapping(rows.x.as_ptr(), at(layout.hidden_states).cast(), n * HIDDEN);
            std::ptr::copy_nonoverlapping(rows.ids.as_ptr(), at(layout.topk_ids).cast(), n * TOP_K);
            std::ptr::copy_nonoverlapping(rows.weights.as_ptr(), at(layout.topk_weights).cast(), n * TOP_K);
        }
        let epoch = self.epochs[index] + 1 + lost;
        let request = &slot.header().request;
        request.layer.store(layer, Ordering::Relaxed);
        request.rows.store(n as u32, Ordering::Relaxed);
        request.row_bytes.store(HIDDEN as u32 * 4, Ordering::Relaxed);
        request.top_k.store(TOP_K as u32, Ordering::Relaxed);
        request.epoch.store(epoch, Ordering::Release);
        self.epochs[index] = epoch;
        epoch
    }

    /// As `lk_receive`: the rows, or the status.
    fn receive(&self, slot_layer: u32, rows: usize) -> Result<Vec<u8>, u32> {
        let (index, slot) = self.slot(slot_layer);
        let answer = &slot.header().answer;
        let started = Instant::now();
        let mut polls = 0u32;
        while answer.done.load(Ordering::Acquire) < self.epochs[index] {
            polls += 1;
            if polls.is_multiple_of(256) {
                assert!(
                    started.elapsed() < HANG,
                    "no answer to epoch {} of slot {index}",
                    self.epochs[index]
                );
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        match answer.status.load(Ordering::Relaxed) {
            0 => {
                let at = slot.base().as_ptr().wrapping_add(slot.layout().output);
                let mut out = vec![0u8; rows * HIDDEN * 4];
                // SAFETY: the answer has been acquired; the part holds CAPACITY rows.
                unsafe { std::ptr::copy_nonoverlapping(at, out.as_mut_ptr(), out.len()) };
                Ok(out)
            }
            status => Err(status),
        }
    }
}

fn expected(layer: &Layer, rows: &Rows) -> Vec<u8> {
    let x = rows.bytes();
    // Aligned to its elements, which a Vec<u8> need not be.
    let mut out = crate::mem::AlignedVec::<u8>::zeroed(x.len());
    let input =
        StepInput { hidden_states: &x, topk_ids: &rows.ids, topk_weights: &rows.weights, expert_map: None };
    layer.forward(&input, &mut out).unwrap();
    out.to_vec()
}

#[test]
fn a_hundred_thousand_rounds_return_their_own_rows() {
    let house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
    let mut gpu = house.gpu();
    for round in 0..100_000u64 {
        let number = (round % 2) as u32;
        let live = round % 101 == 0;
        let rows = Rows::new(round, 1 + (round % CAPACITY as u64) as usize, live);
        let named = if round % 3 == 0 && !live { ECHO_LAYER } else { number };
        gpu.send(number, named, &rows, 0);
        let out = gpu.receive(number, rows.rows()).unwrap();
        let want = match named {
            ECHO_LAYER => rows.bytes(),
            _ if live => expected(&house.layers[number as usize], &rows),
            _ => vec![0; out.len()],
        };
        assert!(out == want, "round {round}: rows of another step");
    }
    house.mailbox.check().unwrap();
    let stats = house.mailbox.stats();
    assert_eq!((stats[0], stats[2]), (("requests", 100_000), ("skipped", 0)));
}

#[test]
fn a_late_request_is_served_and_a_lost_one_is_passed_over() {
    let quick = LeaderOptions { spin: Duration::from_millis(1), nap: Duration::from_micros(50) };
    let house = House::new(&EngineOptions::default(), quick);
    let mut gpu = house.gpu();
    let rows = Rows::new(5, 3, true);
    std::thread::sleep(Duration::from_millis(30));
    for lost in [0, 2, 0, 7] {
        gpu.send(1, 1, &rows, lost);
        // The epoch that is answered is the last one, whatever happened to those before.
        assert_eq!(gpu.receive(1, 3).unwrap(), expected(&house.layers[1], &rows));
        std::thread::sleep(Duration::from_millis(5));
    }
    // An answer that nobody waited for does not answer the next request.
    gpu.send(0, 0, &Rows::new(1, 8, true), 0);
    gpu.receive(0, 8).unwrap();
    gpu.send(0, 0, &rows, 0);
    assert_eq!(gpu.receive(0, 3).unwrap(), expected(&house.layers[0], &rows));
    let stats = house.mailbox.stats();
    assert_eq!((stats[0].1, stats[2].1), (6, 9), "{stats:?}");
    assert!(stats[3].1 > 0, "the leader never napped: {stats:?}");
}

/// After a failure every wait returns, on both slots, and the reason is told.
fn assert_ended(house: &House, gpu: &mut FakeGpu<'_>, words: &[&str]) {
    let text = house.mailbox.check().unwrap_err().to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    for number in [0, 1, 0, 1] {
        gpu.send(number, number, &Rows::new(1, 1, false), 0);
        assert!(gpu.receive(number, 1).is_err());
    }
}

#[test]
fn a_refused_input_ends_the_hand_over_with_its_place() {
    let house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
    let mut gpu = house.gpu();
    let mut rows = Rows::new(9, 2, true);
    rows.ids[3] = EXPERTS as i32;
    gpu.send(1, 1, &rows, 0);
    assert_eq!(gpu.receive(1, 2), Err(super::slot::STATUS_FAILED));
    assert_ended(&house, &mut gpu, &["rank 3", "model.layers.1.mlp.experts", "topk_ids[1, 1]", "worker 1"]);
}

#[test]
fn a_request_that_does_not_fit_is_refused_before_memory_is_touched() {
    let house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
    let mut gpu = house.gpu();
    let slot = gpu.slot(0).1;
    slot.header().request.rows.store(CAPACITY as u32 + 1, Ordering::Relaxed);
    slot.header().request.row_bytes.store(HIDDEN as u32 * 4, Ordering::Relaxed);
    slot.header().request.epoch.store(1, Ordering::Release);
    gpu.epochs[0] = 1;
    assert!(gpu.receive(0, 1).is_err());
    assert_ended(&house, &mut gpu, &["9 rows", "slot of 8 rows"]);
}

#[test]
fn a_workers_panic_rings_with_a_status() {
    for worker in [0, 1] {
        let house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
        let mut gpu = house.gpu();
        let rows = Rows::new(2, 4, true);
        gpu.send(0, 0, &rows, 0);
        gpu.receive(0, 4).unwrap();
        house.engine.inject_fault(worker, Fault::Panic);
        gpu.send(1, 1, &rows, 0);
        assert_eq!(gpu.receive(1, 4), Err(super::slot::STATUS_FAILED));
        let blame = format!("worker {worker} failed: injected fault");
        assert_ended(&house, &mut gpu, &["model.layers.1.mlp.experts", "request 1", &blame]);
    }
}

#[test]
fn a_step_without_progress_rings_before_the_worker_comes_back() {
    for worker in [0, 1] {
        let limit = Duration::from_millis(100);
        let options = EngineOptions { step_timeout: limit, ..EngineOptions::default() };
        let house = House::new(&options, LeaderOptions::DEFAULT);
        let mut gpu = house.gpu();
        let stall = Duration::from_secs(4);
        house.engine.inject_fault(worker, Fault::Stall(stall));
        let started = Instant::now();
        gpu.send(0, 0, &Rows::new(2, 4, true), 0);
        assert_eq!(gpu.receive(0, 4), Err(super::slot::STATUS_FAILED));
        assert!(started.elapsed() < stall, "rung after {:?}", started.elapsed());
        assert_ended(&house, &mut gpu, &["model.layers.0.mlp.experts", &format!("worker {worker} running")]);
        // The worker comes back and answers its request; that does not undo the end.
        let mailbox = Arc::clone(&house.mailbox);
        drop(house);
        assert_eq!(mailbox.slot_of(0).1.header().answer.done.load(Ordering::Relaxed), u64::MAX);
    }
}

#[test]
fn closing_releases_who_waits_and_ends_the_thread() {
    let mut house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
    let gpu = FakeGpu { mailbox: &house.mailbox, epochs: [1; SLOTS] };
    std::thread::scope(|scope| {
        // Waits for an epoch that was never sent.
        let waiting = scope.spawn(|| gpu.receive(0, 1));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        house.leader.stop();
        assert_eq!(waiting.join().unwrap(), Err(super::slot::STATUS_CLOSED));
    });
    let text = house.mailbox.check().unwrap_err().to_string();
    assert!(text.contains("closed"), "{text}");
    assert_eq!(Arc::strong_count(&house.mailbox), 2, "the thread still holds the mailbox");
}

#[test]
fn a_gpu_that_stopped_waiting_is_an_error_that_names_the_layer() {
    let house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
    let mut gpu = house.gpu();
    gpu.send(1, 1, &Rows::new(2, 1, true), 0);
    gpu.receive(1, 1).unwrap();
    house.mailbox.check().unwrap();
    gpu.slot(1).1.header().fault.epoch.store(1, Ordering::Release);
    let text = house.mailbox.check().unwrap_err().to_string();
    assert!(text.contains("model.layers.1.mlp.experts") && text.contains("stopped waiting"), "{text}");
}

#[test]
fn an_idle_leader_leaves_the_core_and_still_sees_requests_soon() {
    let house = House::new(&EngineOptions::default(), LeaderOptions::DEFAULT);
    let mut gpu = house.gpu();
    let mut clock = 0;
    // SAFETY: the thread lives; the result is written through the pointer.
    let status = unsafe { libc::pthread_getcpuclockid(house.leader.thread().as_pthread_t(), &raw mut clock) };
    assert_eq!(status, 0);
    let busy = || {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a clock of a live thread.
        assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut t) }, 0);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    std::thread::sleep(Duration::from_millis(50));
    let (before, started) = (busy(), Instant::now());
    std::thread::sleep(Duration::from_millis(500));
    let share = busy().saturating_sub(before).as_secs_f64() / started.elapsed().as_secs_f64();
    assert!(share < 0.25, "the idle leader takes {share:.2} of a core");
    let mut waits = Vec::new();
    for _ in 0..41 {
        std::thread::sleep(Duration::from_millis(8));
        let started = Instant::now();
        gpu.send(0, ECHO_LAYER, &Rows::new(1, 1, false), 0);
        gpu.receive(0, 1).unwrap();
        waits.push(started.elapsed());
    }
    waits.sort_unstable();
    // A busy machine delays some rounds by whole time slices; a nap that is too long would be in every one.
    assert!(waits[0] < Duration::from_millis(1), "at best {:?} from idle", waits[0]);
    eprintln!("idle leader: {share:.3} of a core, answer after {:?} (median {:?})", waits[0], waits[20]);
}
