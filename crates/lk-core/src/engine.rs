//! The engine of one process: topology, workers, kernels and scratch; layers hang on it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::fault::{ArmedFault, Fault, strike};
use crate::format::WeightFormat;
use crate::kernel::{Family, KernelSet, VecOps};
use crate::mem::{MemBinder, NullBinder, SyscallBinder};
use crate::moe::weights::NodeWeights;
use crate::moe::{Layer, LayerSpec, Scratch};
use crate::pool::{Pool, PoolOptions, StuckHandler, Worker};
use crate::simd::{Cpu, IsaLevel};
pub use crate::topology::Binding;
use crate::topology::{CpuId, NodeId, PlanRequest, Topology, WorkerPlan, plan_workers};
use crate::{Dtype, Error, Result};

/// Settings of an engine, already typed; the names are those of the flags without prefix.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Worker threads of this process (`LK_THREADS`); by default see [`plan_workers`].
    pub threads: Option<usize>,
    /// NUMA nodes to use (`LVLLM_NUMA_NODES`); all allowed by default.
    pub nodes: Option<Vec<NodeId>>,
    /// How threads are bound (`LK_THREAD_BINDING`).
    pub binding: Binding,
    /// Tensor-parallel rank of this process on this machine.
    pub rank: usize,
    /// Number of such processes on this machine.
    pub world: usize,
    /// Node that the GPU hangs on.
    pub gpu_node: Option<NodeId>,
    /// CPUs that the server as a whole may use; by default what the main thread of this process may use.
    pub allowed_cpus: Option<Vec<CpuId>>,
    /// Physical cores left to the server's own threads.
    pub reserve_cores: usize,
    /// Highest instruction set (`LVLLM_ISA`); by default all that the CPU has.
    pub isa: Option<String>,
    /// Compute family to pin (`LVLLM_KERNEL`); measured by default.
    pub kernel: Option<String>,
    /// Compute mode (`LVLLM_COMPUTE`).
    pub compute: String,
    /// Microseconds that idle workers spin before they park.
    pub spin_us: Option<u32>,
    /// Idle workers never spin (`LK_POWER_SAVING`).
    pub power_saving: bool,
    /// Time without progress after which a step fails (`LVLLM_STEP_TIMEOUT_S`).
    pub step_timeout: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            nodes: None,
            binding: Binding::CpuCore,
            rank: 0,
            world: 1,
            gpu_node: None,
            allowed_cpus: None,
            reserve_cores: 0,
            isa: None,
            kernel: None,
            compute: "exact".to_owned(),
            spin_us: None,
            power_saving: false,
            step_timeout: Duration::from_secs(120),
        }
    }
}

/// What layers share.
pub(crate) struct Shared {
    plan: WorkerPlan,
    pool: Arc<Pool>,
    cpu: Cpu,
    ops: &'static VecOps,
    family: Option<Family>,
    /// None with one node, where every page is local.
    binder: Option<SyscallBinder>,
    scratch: Mutex<Scratch>,
    sets: Mutex<HashMap<SetKey, KernelSet>>,
    step_timeout: Duration,
    rank: usize,
    power_saving: bool,
    fault: ArmedFault,
    /// Told when a worker hangs for good; set by who waits for results elsewhere than in a call of the engine.
    on_stuck: Arc<Mutex<Option<StuckHandler>>>,
    closed: AtomicBool,
    notes: Mutex<Vec<String>>,
}

/// What a measured kernel choice depends on: format, activation dtype, N and K.
type SetKey = (WeightFormat, Dtype, usize, usize);

impl Shared {
    pub(crate) fn plan(&self) -> &WorkerPlan {
        &self.plan
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn binder(&self) -> &dyn MemBinder {
        match &self.binder {
            Some(binder) => binder,
            None => &NullBinder,
        }
    }

    pub(crate) fn ops(&self) -> &'static VecOps {
        self.ops
    }

    /// Runs a job on all workers; the calling thread is worker 0.
    pub(crate) fn run(&self, job: &(dyn Fn(&Worker<'_>) -> Result<()> + Sync)) -> Result<()> {
        match self.fault.take() {
            None => self.pool.run_with_timeout(job, self.step_timeout),
            Some(fault) => self.pool.run_with_timeout(
                &|worker| {
                    strike(fault, worker);
                    job(worker)
                },
                self.step_timeout,
            ),
        }
    }

    /// Scratch of the engine; holding it means that no other step or intake runs.
    ///
    /// # Errors
    /// [`Error::Poisoned`] after a caller panicked in the middle of a step.
    pub(crate) fn lock_scratch(&self) -> Result<MutexGuard<'_, Scratch>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Argument("the engine was closed: make a new one".to_owned()));
        }
        self.scratch.lock().map_err(|_| Error::Poisoned {
            worker: 0,
            message: "a step of this engine panicked; restart the server".to_owned(),
        })
    }

    /// Kernels for w13 and w2 of a layer, measured once per format, dtype and shape.
    pub(crate) fn kernels(&self, spec: &LayerSpec, nodes: &[NodeWeights]) -> Result<(KernelSet, KernelSet)> {
        let rows =
            nodes.iter().flat_map(|n| &n.slices).map(|s| s.rows).max().unwrap_or(spec.intermediate_size);
        let mut sets = self.sets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut get = |n: usize, k: usize| -> Result<KernelSet> {
            let key = (spec.format, spec.dtype, n, k);
            if let Some(set) = sets.get(&key) {
                return Ok(set.clone());
            }
            let mut set = KernelSet::build(spec.format, self.cpu, spec.dtype)
                .map_err(|e| Error::UnsupportedFormat(format!("{}: {e}", spec.name)))?;
            match self.family {
                Some(family) => set.pin(family)?,
                None => set.measure(n, k)?,
            }
            sets.insert(key, set.clone());
            Ok(set)
        };
        Ok((get(rows, spec.hidden_size)?, get(spec.hidden_size, rows)?))
    }
}

/// Worker pool, kernels and scratch of one process.
pub struct Engine(Arc<Shared>);

impl Engine {
    /// Reads the machine, plans and starts the workers.
    ///
    /// # Errors
    /// A setting out of range, a forced instruction set that the CPU lacks, no allowed CPU.
    pub fn new(options: &EngineOptions) -> Result<Arc<Self>> {
        let topology = Topology::detect(options.allowed_cpus.as_deref())?;
        let plan = plan_workers(
            &topology,
            &PlanRequest {
                threads: options.threads,
                binding: options.binding,
                nodes: options.nodes.clone(),
                rank: options.rank,
                world: options.world,
                gpu_node: options.gpu_node,
                gpu_nodes: Vec::new(),
                reserve_cores: options.reserve_cores,
            },
        )?;
        let engine = Self::with_plan(plan, options)?;
        engine.0.notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(topology.notes);
        Ok(engine)
    }

    /// Starts the workers of a given plan instead of one made from the machine's topology (tests, several engines in
    /// one process).
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_plan(plan: WorkerPlan, options: &EngineOptions) -> Result<Arc<Self>> {
        if options.compute != "exact" {
            return Err(Error::Config(format!(
                "LVLLM_COMPUTE={}: this version computes in exact mode only; use exact",
                options.compute
            )));
        }
        let level = options.isa.as_deref().map(IsaLevel::parse).transpose()?;
        let cpu = match level {
            Some(level) => Cpu::detect().capped(level)?,
            None => Cpu::detect(),
        };
        let family = options.kernel.as_deref().map(Family::parse).transpose()?;
        let mut pool_options = PoolOptions { power_saving: options.power_saving, ..PoolOptions::default() };
        if let Some(spin_us) = options.spin_us {
            pool_options.spin_us = spin_us;
        }
        let on_stuck: Arc<Mutex<Option<StuckHandler>>> = Arc::default();
        let told = Arc::clone(&on_stuck);
        pool_options.on_stuck = Some(Arc::new(move |state: &str| {
            let handler = told.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
            if let Some(handler) = handler {
                handler(state);
            }
        }));
        let pool = Pool::new(&plan, &pool_options)?;
        let mut notes = plan.notes.clone();
        notes.extend(pool.notes().iter().cloned());
        let binder = (plan.nodes.len() > 1).then(SyscallBinder::new);
        let workers: Vec<_> = plan.nodes.iter().map(|n| n.workers.len()).collect();
        Ok(Arc::new(Self(Arc::new(Shared {
            ops: VecOps::get(cpu),
            plan,
            pool,
            cpu,
            family,
            binder,
            scratch: Mutex::new(Scratch::new(&workers)),
            sets: Mutex::new(HashMap::new()),
            step_timeout: options.step_timeout,
            rank: options.rank,
            power_saving: options.power_saving,
            fault: ArmedFault::default(),
            on_stuck,
            closed: AtomicBool::new(false),
            notes: Mutex::new(notes),
        }))))
    }

    /// Makes an empty layer: load every expert, then seal it.
    ///
    /// # Errors
    /// Shapes that do not fit, a format without kernels, no memory.
    pub fn create_layer(&self, spec: LayerSpec) -> Result<Arc<Layer>> {
        Layer::new(spec, self.0.clone()).map(Arc::new)
    }

    /// The workers and where they run.
    pub fn plan(&self) -> &WorkerPlan {
        &self.0.plan
    }

    /// Name of the best instruction set in use.
    pub fn isa_name(&self) -> &'static str {
        self.0.cpu.level().name()
    }

    /// Clamps, fall-backs and refusals that the user should read once.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.0.notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        notes.extend(self.0.binder.as_ref().and_then(SyscallBinder::note));
        notes
    }

    /// What each worker last did, for reports of time-outs.
    pub fn state(&self) -> String {
        self.0.pool.state()
    }

    /// As [`Engine::state`], for a thread that must not own the engine's handle.
    pub fn state_reader(&self) -> Box<dyn Fn() -> String + Send> {
        let shared = Arc::clone(&self.0);
        Box::new(move || shared.pool.state())
    }

    /// Has `handler` told, once per job and on the watchdog's thread, when a worker hangs in a step and does not leave it.
    pub fn on_stuck(&self, handler: StuckHandler) {
        *self.0.on_stuck.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(handler);
    }

    /// Has one worker fail in the next step; for tests of what a server then does.
    pub fn inject_fault(&self, worker: usize, fault: Fault) {
        self.0.fault.arm(worker, fault);
    }

    /// Tensor-parallel rank of this process.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Whether idle threads must not spin.
    pub fn power_saving(&self) -> bool {
        self.0.power_saving
    }

    /// Time without progress after which a step fails.
    pub fn step_timeout(&self) -> Duration {
        self.0.step_timeout
    }

    /// Places memory on nodes.
    pub(crate) fn binder(&self) -> &dyn MemBinder {
        self.0.binder()
    }

    /// Refuses all later steps and intakes. The workers sleep, and end with the last layer of the engine.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::Release);
    }

    /// Counters of the engine.
    pub fn stats(&self) -> [(&'static str, u64); 2] {
        [("workers", self.0.pool.workers() as u64), ("nodes", self.0.plan.nodes.len() as u64)]
    }
}
