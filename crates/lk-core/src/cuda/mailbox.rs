//! Both slots of an engine, the layers that requests may name, and how the hand-over ended.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::engine::Engine;
use crate::moe::{Layer, StepInput};
use crate::{Error, Result};

use super::slot::{STATUS_CLOSED, STATUS_FAILED, Slot, SlotLayout};

/// Slots of an engine; layers alternate between them.
pub const SLOTS: usize = 2;
/// Layers that one engine can register.
pub const MAX_LAYERS: usize = 4096;
/// Layer number of a request that asks for its own rows back; see `Handover::attach`.
pub const ECHO_LAYER: u32 = u32::MAX;

/// A layer that GPU requests may name.
pub(super) struct Registered {
    layer: Arc<Layer>,
    expert_map: Option<Vec<i32>>,
}

impl Registered {
    /// The layer.
    pub(super) fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Bytes of one row of `hidden_states`.
    pub(super) fn row_bytes(&self) -> usize {
        self.layer.spec().hidden_size * self.layer.spec().dtype.bytes()
    }
}

/// What the leader thread, the host's side of the launches and the watchdog share.
pub struct Mailbox {
    slots: [Slot; SLOTS],
    layers: Box<[OnceLock<Registered>]>,
    num_layers: Mutex<usize>,
    /// Why the hand-over ended, if it did otherwise than by `close`.
    failure: OnceLock<String>,
    /// Tensor-parallel rank, for messages.
    rank: usize,
    pub(super) stop: AtomicBool,
    pub(super) stats: Counters,
    /// What the leader is computing, for the dump of a stuck step: layer number and epoch (0 when idle).
    current_layer: AtomicU32,
    current_epoch: AtomicU64,
    /// Owner of the slots' memory; dropped last.
    _memory: Box<dyn Any + Send + Sync>,
}

/// Counters of the leader; relaxed.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) rows: AtomicU64,
    pub(super) skipped: AtomicU64,
    pub(super) naps: AtomicU64,
}

impl Mailbox {
    /// A mailbox in `memory`, whose first byte is at `base`.
    ///
    /// # Safety
    /// `SLOTS * layout.bytes` zeroed, page-aligned bytes at `base` are mapped as long as `memory` lives.
    pub unsafe fn new(
        base: NonNull<u8>,
        layout: SlotLayout,
        memory: Box<dyn Any + Send + Sync>,
        rank: usize,
    ) -> Arc<Self> {
        // SAFETY: each slot gets its own part of what the caller vouches for.
        let slot = |n: usize| unsafe { Slot::new(base.add(n * layout.bytes), layout) };
        Arc::new(Self {
            slots: std::array::from_fn(slot),
            layers: (0..MAX_LAYERS).map(|_| OnceLock::new()).collect(),
            num_layers: Mutex::new(0),
            failure: OnceLock::new(),
            rank,
            stop: AtomicBool::new(false),
            stats: Counters::default(),
            current_layer: AtomicU32::new(0),
            current_epoch: AtomicU64::new(0),
            _memory: memory,
        })
    }

    /// The slots.
    pub fn slots(&self) -> &[Slot; SLOTS] {
        &self.slots
    }

    /// The slot of a layer.
    pub fn slot_of(&self, layer: u32) -> (usize, &Slot) {
        let index = layer as usize % SLOTS;
        (index, &self.slots[index])
    }

    /// Ends the hand-over when a worker of the engine hangs in a step and does not leave it.
    pub fn watch(self: &Arc<Self>, engine: &Engine) {
        let mailbox = Arc::downgrade(self);
        engine.on_stuck(Arc::new(move |state: &str| {
            if let Some(mailbox) = mailbox.upgrade() {
                mailbox.fail("a worker hangs in its share of the step", state);
            }
        }));
    }

    /// Gives a layer its number; the layer lives as long as the mailbox. `expert_map` as in [`StepInput`].
    ///
    /// # Errors
    /// [`Error::Shape`] when the layer's rows do not fit the slots, [`Error::Argument`] beyond [`MAX_LAYERS`].
    pub fn add_layer(&self, layer: Arc<Layer>, expert_map: Option<Vec<i32>>) -> Result<u32> {
        let entry = Registered { layer, expert_map };
        let (spec, layout) = (entry.layer.spec(), self.slots[0].layout());
        if entry.row_bytes() > layout.max_row_bytes || spec.top_k > layout.max_top_k {
            return Err(Error::Shape(format!(
                "{}: rows of {} bytes with {} experts exceed the hand-over slots, made for {} bytes and {} experts",
                spec.name,
                entry.row_bytes(),
                spec.top_k,
                layout.max_row_bytes,
                layout.max_top_k
            )));
        }
        let mut count = lock(&self.num_layers);
        let cell = self.layers.get(*count).ok_or_else(|| {
            Error::Argument(format!("{}: more than {MAX_LAYERS} layers in one hand-over", spec.name))
        })?;
        // The cell at `count` is empty: it is filled under this lock only.
        let _ = cell.set(entry);
        *count += 1;
        Ok(*count as u32 - 1)
    }

    /// The layer of a number.
    ///
    /// # Errors
    /// [`Error::Argument`] for a number that [`Mailbox::add_layer`] did not give.
    pub(super) fn layer(&self, number: u32) -> Result<&Registered> {
        self.layers
            .get(number as usize)
            .and_then(OnceLock::get)
            .ok_or_else(|| Error::Argument(format!("the hand-over has no layer {number}")))
    }

    /// Computes the request in `slot`, whose epoch the caller has acquired. Does not answer it.
    pub(super) fn compute(&self, slot: &Slot, epoch: u64) -> Result<()> {
        let request = &slot.header().request;
        let get = |word: &AtomicU32| word.load(Ordering::Relaxed);
        let (number, rows) = (get(&request.layer), get(&request.rows) as usize);
        let (row_bytes, top_k) = (get(&request.row_bytes) as usize, get(&request.top_k) as usize);
        self.current_layer.store(number, Ordering::Relaxed);
        self.current_epoch.store(epoch, Ordering::Release);
        // SAFETY: the epoch has been acquired and is answered only after this returns.
        let payload = unsafe { slot.payload(rows, row_bytes, top_k) }?;
        self.stats.requests.fetch_add(1, Ordering::Relaxed);
        self.stats.rows.fetch_add(rows as u64, Ordering::Relaxed);
        if number == ECHO_LAYER {
            payload.output.copy_from_slice(payload.hidden_states);
            return Ok(());
        }
        let entry = self.layer(number)?;
        if entry.row_bytes() != row_bytes || entry.layer.spec().top_k != top_k {
            return Err(Error::Handover(format!(
                "{}: a request with rows of {row_bytes} bytes and {top_k} experts, the layer has {} and {}",
                entry.layer.spec().name,
                entry.row_bytes(),
                entry.layer.spec().top_k
            )));
        }
        let input = StepInput {
            hidden_states: payload.hidden_states,
            topk_ids: payload.topk_ids,
            topk_weights: payload.topk_weights,
            expert_map: entry.expert_map.as_deref(),
        };
        entry.layer.forward(&input, payload.output)
    }

    /// The leader has answered.
    pub(super) fn idle(&self) {
        self.current_epoch.store(0, Ordering::Relaxed);
    }

    /// Ends the hand-over with a reason; releases every wait on the GPU. The first reason stays.
    #[cold]
    pub(super) fn fail(&self, why: &str, state: &str) {
        let epoch = self.current_epoch.load(Ordering::Acquire);
        let number = self.current_layer.load(Ordering::Relaxed);
        let place = match self.layer(number) {
            _ if epoch == 0 => "between two requests".to_owned(),
            Ok(entry) => format!("{}, request {epoch} of its slot", entry.layer.spec().name),
            Err(_) => format!("layer number {number}, request {epoch} of its slot"),
        };
        let text = format!(
            "the CPU engine of rank {} failed in {place}: {why}; state: {state}. The outputs of this step are zeros; \
             restart the server",
            self.rank
        );
        let _ = self.failure.set(text);
        self.end(STATUS_FAILED);
    }

    /// Ends the hand-over in order: nobody waits again, outputs are zeros from now on.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Release);
        self.end(STATUS_CLOSED);
    }

    fn end(&self, status: u32) {
        for slot in &self.slots {
            slot.end(status);
        }
    }

    /// Whether everything is well; two loads of host memory when it is.
    ///
    /// # Errors
    /// [`Error::Handover`] with the dump of the first failure, or when the GPU gave up waiting.
    #[inline]
    pub fn check(&self) -> Result<()> {
        let quiet = self.slots.iter().all(|slot| {
            slot.header().answer.status.load(Ordering::Acquire) == 0
                && slot.header().fault.epoch.load(Ordering::Acquire) == 0
        });
        if quiet { Ok(()) } else { Err(self.verdict()) }
    }

    #[cold]
    fn verdict(&self) -> Error {
        if let Some(text) = self.failure.get() {
            return Error::Handover(text.clone());
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let (header, request) = (slot.header(), &slot.header().request);
            let fault = header.fault.epoch.load(Ordering::Acquire);
            if fault != 0 {
                let number = request.layer.load(Ordering::Relaxed);
                let name = self
                    .layer(number)
                    .map_or_else(|_| format!("layer {number}"), |l| l.layer.spec().name.clone());
                return Error::Handover(format!(
                    "the GPU stopped waiting for the CPU engine of rank {} ({name}, slot {index}, request {fault}, answered \
                     up to {}, {} requests served): the leader thread did not run or a step exceeded \
                     LVLLM_STEP_TIMEOUT_S. The outputs of this step are zeros; restart the server",
                    self.rank,
                    header.answer.done.load(Ordering::Relaxed),
                    self.stats.requests.load(Ordering::Relaxed)
                ));
            }
        }
        Error::Handover("the hand-over was closed; make a new engine".to_owned())
    }

    /// Names and values: `requests`, `rows`, `skipped` (epochs never seen), `naps` of the leader.
    pub fn stats(&self) -> [(&'static str, u64); 4] {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let s = &self.stats;
        [
            ("requests", get(&s.requests)),
            ("rows", get(&s.rows)),
            ("skipped", get(&s.skipped)),
            ("naps", get(&s.naps)),
        ]
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
