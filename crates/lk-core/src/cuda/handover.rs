//! The host's side: makes slots, kernels and leader for one engine and one GPU, and launches.

use std::any::Any;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::moe::Layer;
use crate::{Error, Result};

use super::driver::{Device, DeviceBuffer, DevicePtr, Function, Module, Stream};
use super::leader::{Leader, LeaderOptions};
use super::mailbox::{ECHO_LAYER, Mailbox, SLOTS};
use super::nvrtc::{KERNELS, Nvrtc, THREADS, Target, source};
use super::pinned::PinnedBuffer;
use super::slot::SlotLayout;

/// Settings of a hand-over.
#[derive(Debug, Clone)]
pub struct HandoverOptions {
    /// Number of the GPU in this process.
    pub device: u32,
    /// Most rows of one send; longer steps are cut by the caller.
    pub capacity_tokens: usize,
    /// Bytes of the widest row of `hidden_states` over all layers.
    pub max_row_bytes: usize,
    /// Most experts per row over all layers.
    pub max_top_k: usize,
    /// Folder for compiled kernels.
    pub cache: Option<PathBuf>,
    /// Folders in which to look for libnvrtc.
    pub nvrtc_folders: Vec<PathBuf>,
    /// Payload bytes per block of a kernel; more blocks are used for larger steps.
    pub bytes_per_block: usize,
    /// Most blocks of a kernel; never more than half the device's multiprocessors.
    pub max_blocks: u32,
    /// How the leader waits; by default after the engine's power setting.
    pub leader: Option<LeaderOptions>,
}

impl HandoverOptions {
    /// Four copies in flight per thread of a block.
    pub const BYTES_PER_BLOCK: usize = 32 << 10;
    /// Enough for the link's rate.
    pub const MAX_BLOCKS: u32 = 32;
}

/// Device addresses of one step's rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceRows {
    /// `[rows, hidden_size]` in the layer's dtype, contiguous.
    pub hidden_states: DevicePtr,
    /// `[rows, top_k]` int32, contiguous.
    pub topk_ids: DevicePtr,
    /// `[rows, top_k]` f32, contiguous.
    pub topk_weights: DevicePtr,
    /// Rows, at least 1 and at most the capacity.
    pub rows: usize,
    /// Which rows are padding.
    pub padding: Padding,
}

/// How the device knows padding rows; address 0 = not given. Both may be given.
#[derive(Debug, Clone, Copy, Default)]
pub struct Padding {
    /// `[rows]` bytes, nonzero for padding.
    pub mask: DevicePtr,
    /// One int32: rows from here on are padding.
    pub num_rows: DevicePtr,
}

/// Room for a slot's counters, see `SlotState` in handover.cu; the failure word follows the slots.
const STATE_BYTES: usize = 128;
/// The GPU waits this much longer than a step may take without progress, so that the engine reports first.
const GPU_MARGIN: Duration = Duration::from_secs(5);
/// Rows, and limit, of the trial at the start.
const TRIAL_ROWS: usize = 8;
const TRIAL_ROUNDS: usize = 32;
const TRIAL_LIMIT: Duration = Duration::from_secs(10);

/// The hand-over of one engine. Graphs that captured its kernels must not be replayed after it is dropped.
pub struct Handover {
    // In order of dropping: the leader ends and every wait with it; freeing the state waits for the kernels; then the
    // slots go.
    leader: Leader,
    state: DeviceBuffer,
    mailbox: Arc<Mailbox>,
    send: Function,
    receive: Function,
    _module: Module,
    /// First byte of the slots for the device.
    slots: DevicePtr,
    device: Arc<Device>,
    limit_ns: u64,
    bytes_per_block: usize,
    max_blocks: u32,
    notes: Vec<String>,
    /// Of one round of the trial.
    round_trip: Duration,
}

// SAFETY: `DeviceBuffer` is an address that only kernels use after the constructor.
unsafe impl Send for Handover {}
// SAFETY: launches are driver calls, which may come from any thread.
unsafe impl Sync for Handover {}

impl Handover {
    /// Makes slots, kernels and leader, and sends rows to the leader and back as a trial.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`], [`Error::Cuda`], [`Error::Nvrtc`], [`Error::Shape`] for sizes out of range,
    /// [`Error::Handover`] when the trial brings back other bytes than it sent, or none.
    pub fn attach(engine: &Engine, options: &HandoverOptions) -> Result<Self> {
        let layout = SlotLayout::new(options.capacity_tokens, options.max_row_bytes, options.max_top_k)?;
        let device = Arc::new(Device::open(options.device)?);
        let nvrtc = Nvrtc::load(&options.nvrtc_folders)?;
        let target = Target::choose(device.capability, &nvrtc.architectures)?;
        let image = nvrtc.compile_cached(&source(), target, options.cache.as_deref())?;
        let (module, [send, receive]) = device.load(&image, KERNELS)?;
        let state = device.allocate((SLOTS + 1) * STATE_BYTES)?;

        let node = &engine.plan().nodes[0];
        let cpus = node.workers[0].cpus.clone();
        let (memory, mut notes) =
            PinnedBuffer::new(Arc::clone(&device), SLOTS * layout.bytes, node.node, engine.binder())
                .map(|(memory, note)| (memory, Vec::from_iter(note)))?;
        let (base, slots) = (memory.start(), memory.device_ptr());
        let memory: Box<dyn Any + Send + Sync> = Box::new(memory);
        // SAFETY: the buffer is zeroed, page-aligned, of that size, and owned by the mailbox from here.
        let mailbox = unsafe { Mailbox::new(base, layout, memory, engine.rank()) };
        mailbox.watch(engine);
        let leader = options.leader.unwrap_or(if engine.power_saving() {
            LeaderOptions::POWER_SAVING
        } else {
            LeaderOptions::DEFAULT
        });
        let (leader, note) = Leader::start(engine, Arc::clone(&mailbox), cpus, leader)?;
        notes.extend(note);
        let limit = engine.step_timeout().saturating_add(GPU_MARGIN);
        let mut handover = Self {
            leader,
            state,
            mailbox,
            send,
            receive,
            _module: module,
            slots,
            limit_ns: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX >> 1),
            bytes_per_block: options.bytes_per_block.max(1024),
            max_blocks: options.max_blocks.clamp(1, device.multiprocessors()?.div_ceil(2)),
            device,
            notes,
            round_trip: Duration::ZERO,
        };
        handover.trial()?;
        Ok(handover)
    }

    /// Sends patterned rows to the leader, which returns them, through both slots; also has the driver load what it
    /// loads lazily.
    fn trial(&mut self) -> Result<()> {
        let layout = *self.mailbox.slots()[0].layout();
        let row_bytes = layout.max_row_bytes;
        let rows = TRIAL_ROWS.min(layout.capacity_tokens);
        let bytes = rows * row_bytes;
        let sent: Vec<u8> = (0..bytes).map(|i| (i * 31 + i / 251) as u8).collect();
        let mut got = vec![0u8; bytes];
        let (from, to) = (self.device.allocate(bytes)?, self.device.allocate(bytes)?);
        let ids = self.device.allocate(rows * layout.max_top_k * 4)?;
        let entered = self.device.enter()?;
        from.write(&sent)?;
        let stream = self.device.create_stream()?;
        let started = Instant::now();
        for round in 0..TRIAL_ROUNDS {
            let input = DeviceRows {
                hidden_states: from.ptr(),
                topk_ids: ids.ptr(),
                topk_weights: ids.ptr(),
                rows,
                padding: Padding::default(),
            };
            self.launch_send(
                round % SLOTS,
                ECHO_LAYER,
                row_bytes,
                layout.max_top_k,
                stream.stream(),
                &input,
            )?;
            self.launch_receive(
                round % SLOTS,
                row_bytes,
                stream.stream(),
                to.ptr(),
                rows,
                Padding::default(),
            )?;
        }
        while !stream.is_done()? {
            if started.elapsed() > TRIAL_LIMIT {
                self.mailbox.close();
                return Err(Error::Handover(format!(
                    "rows sent to the CPU engine as a trial did not come back within {TRIAL_LIMIT:?}: is the leader \
                     thread's CPU taken by other threads at real-time priority?"
                )));
            }
            std::hint::spin_loop();
        }
        self.round_trip = started.elapsed() / TRIAL_ROUNDS as u32;
        self.mailbox.check()?;
        to.read(&mut got)?;
        drop(entered);
        if got != sent {
            let first = got.iter().zip(&sent).position(|(a, b)| a != b).unwrap_or(0);
            return Err(Error::Handover(format!(
                "rows sent to the CPU engine as a trial came back changed, first at byte {first} of {bytes}: this machine \
                 does not keep memory coherent with its GPU; serve with LVLLM_MOE_NUMA_ENABLED unset"
            )));
        }
        Ok(())
    }

    /// Gives a layer its number; see [`Mailbox::add_layer`].
    ///
    /// # Errors
    /// As there.
    pub fn add_layer(&self, layer: Arc<Layer>, expert_map: Option<Vec<i32>>) -> Result<u32> {
        self.mailbox.add_layer(layer, expert_map)
    }

    /// Launches the send of a step's rows. Does not wait; may be captured.
    ///
    /// # Errors
    /// [`Error::Argument`] for addresses or rows out of range, [`Error::Handover`] after a failure, the driver's
    /// refusal.
    pub fn send(&self, layer: u32, stream: Stream, input: &DeviceRows) -> Result<()> {
        self.mailbox.check()?;
        let entry = self.mailbox.layer(layer)?;
        let spec = entry.layer().spec();
        let size = spec.dtype.bytes() as u64;
        self.check_rows(&spec.name, input.rows)?;
        for (name, address, align) in [
            ("hidden_states", input.hidden_states, size),
            ("topk_ids", input.topk_ids, 4),
            ("topk_weights", input.topk_weights, 4),
        ] {
            check_address(&spec.name, name, address, align)?;
        }
        let (slot, _) = self.mailbox.slot_of(layer);
        let _entered = self.device.enter()?;
        self.launch_send(slot, layer, entry.row_bytes(), spec.top_k, stream, input)
    }

    /// Launches the wait for the rows' results, `[rows, hidden_size]` to `output`. Does not wait; may be captured.
    ///
    /// # Errors
    /// As [`Handover::send`].
    pub fn receive(
        &self,
        layer: u32,
        stream: Stream,
        output: DevicePtr,
        rows: usize,
        padding: Padding,
    ) -> Result<()> {
        let entry = self.mailbox.layer(layer)?;
        let spec = entry.layer().spec();
        self.check_rows(&spec.name, rows)?;
        check_address(&spec.name, "output", output, spec.dtype.bytes() as u64)?;
        let (slot, _) = self.mailbox.slot_of(layer);
        let _entered = self.device.enter()?;
        self.launch_receive(slot, entry.row_bytes(), stream, output, rows, padding)
    }

    fn check_rows(&self, layer: &str, rows: usize) -> Result<()> {
        let capacity = self.mailbox.slots()[0].layout().capacity_tokens;
        if rows == 0 || rows > capacity {
            return Err(Error::Argument(format!(
                "{layer}: {rows} rows are not in 1..={capacity}: cut the step"
            )));
        }
        Ok(())
    }

    fn blocks(&self, bytes: usize) -> u32 {
        u32::try_from(bytes.div_ceil(self.bytes_per_block)).unwrap_or(u32::MAX).clamp(1, self.max_blocks)
    }

    fn launch_send(
        &self,
        slot: usize,
        layer: u32,
        row_bytes: usize,
        top_k: usize,
        stream: Stream,
        input: &DeviceRows,
    ) -> Result<()> {
        let layout = self.mailbox.slots()[slot].layout();
        let base = self.slots.offset(slot * layout.bytes);
        let mut hidden_states = input.hidden_states.0;
        let (mut topk_ids, mut topk_weights) = (input.topk_ids.0, input.topk_weights.0);
        let (mut mask, mut num_rows) = (input.padding.mask.0, input.padding.num_rows.0);
        let mut header = base.0;
        let mut slot_hidden_states = base.offset(layout.hidden_states).0;
        let mut slot_topk_ids = base.offset(layout.topk_ids).0;
        let mut slot_topk_weights = base.offset(layout.topk_weights).0;
        let mut state = self.state.ptr().offset(slot * STATE_BYTES).0;
        let mut failed = self.state.ptr().offset(SLOTS * STATE_BYTES).0;
        let (mut rows, mut row_bytes, mut top_k, mut layer) =
            (input.rows as u32, row_bytes as u32, top_k as u32, layer);
        let blocks = self.blocks(rows as usize * row_bytes as usize);
        let mut arguments = arguments([
            &raw mut hidden_states,
            &raw mut topk_ids,
            &raw mut topk_weights,
            &raw mut mask,
            &raw mut num_rows,
            &raw mut header,
            &raw mut slot_hidden_states,
            &raw mut slot_topk_ids,
            &raw mut slot_topk_weights,
            &raw mut state,
            &raw mut failed,
        ])
        .into_iter()
        .chain(arguments([&raw mut rows, &raw mut row_bytes, &raw mut top_k, &raw mut layer]))
        .collect::<Vec<_>>();
        // SAFETY: eleven addresses and four u32, as `lk_send` declares them; slot and state live as long as the hand-over,
        // the rows are checked and the tensors are the caller's.
        unsafe { self.send.launch("cuLaunchKernel(lk_send)", stream, blocks, THREADS, &mut arguments) }
    }

    fn launch_receive(
        &self,
        slot: usize,
        row_bytes: usize,
        stream: Stream,
        output: DevicePtr,
        rows: usize,
        padding: Padding,
    ) -> Result<()> {
        let layout = self.mailbox.slots()[slot].layout();
        let base = self.slots.offset(slot * layout.bytes);
        let (mut output, mut mask, mut num_rows) = (output.0, padding.mask.0, padding.num_rows.0);
        let mut header = base.0;
        let mut slot_output = base.offset(layout.output).0;
        let mut state = self.state.ptr().offset(slot * STATE_BYTES).0;
        let mut failed = self.state.ptr().offset(SLOTS * STATE_BYTES).0;
        let (mut rows, mut row_bytes, mut limit_ns) = (rows as u32, row_bytes as u32, self.limit_ns);
        let blocks = self.blocks(rows as usize * row_bytes as usize);
        let mut arguments = arguments([
            &raw mut output,
            &raw mut mask,
            &raw mut num_rows,
            &raw mut header,
            &raw mut slot_output,
            &raw mut state,
            &raw mut failed,
        ])
        .into_iter()
        .chain(arguments([&raw mut rows, &raw mut row_bytes]))
        .chain(arguments([&raw mut limit_ns]))
        .collect::<Vec<_>>();
        // SAFETY: seven addresses, two u32 and a u64, as `lk_receive` declares them; otherwise as in `launch_send`.
        unsafe { self.receive.launch("cuLaunchKernel(lk_receive)", stream, blocks, THREADS, &mut arguments) }
    }

    /// Whether everything is well; see [`Mailbox::check`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.mailbox.check()
    }

    /// See [`Leader::wake`].
    pub fn wake(&self) {
        self.leader.wake();
    }

    /// Ends the hand-over: kernels that wait return zeros, later sends fail.
    pub fn close(&self) {
        self.mailbox.close();
    }

    /// What degraded at the start.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Time of one round of the trial, launches included, with [`TRIAL_ROWS`] of the widest rows.
    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Most rows of one send.
    pub fn capacity_tokens(&self) -> usize {
        self.mailbox.slots()[0].layout().capacity_tokens
    }

    /// Bytes of pinned host memory.
    pub fn pinned_bytes(&self) -> usize {
        SLOTS * self.mailbox.slots()[0].layout().bytes
    }

    /// Counters of the leader.
    pub fn stats(&self) -> [(&'static str, u64); 4] {
        self.mailbox.stats()
    }
}

fn arguments<T, const N: usize>(values: [*mut T; N]) -> [*mut c_void; N] {
    values.map(<*mut T>::cast)
}

fn check_address(layer: &str, name: &str, address: DevicePtr, align: u64) -> Result<()> {
    if address.0 == 0 || !address.0.is_multiple_of(align) {
        return Err(Error::Argument(format!(
            "{layer}: {name} at {:#x} is null or not aligned to {align} bytes",
            address.0
        )));
    }
    Ok(())
}
