//! What handing out a job and meeting at a barrier cost, beside what the machine allows, and what is left of the
//! throughput when workers and CPUs do not match.
//!
//! `cargo bench -p lk-core --bench barrier [-- --quick]`
//!
//! The limit is one round trip of a cache line between two CPUs, measured in the same run: a job must reach a worker and
//! its end must come back; at a barrier, an arrival must be seen and the release must come back.

#![expect(clippy::print_stdout, reason = "a report")]
#![expect(unsafe_code, reason = "binds threads to CPUs")]

use std::hint::{black_box, spin_loop};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use lk_core::Result;
use lk_core::pool::{Pool, PoolOptions, StealRange};
use lk_core::topology::{CpuId, NodeId, NodePlan, WorkerPlan, WorkerSlot};

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let rounds = if quick { 200 } else { 20_000 };
    let cpus = allowed_cpus();
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|&n| n < cpus.len()).collect();
    counts.push(cpus.len());

    println!("{} CPUs, clock read {:.3} us", cpus.len(), clock_us());
    let limit = ping_pong(&cpus, rounds);
    println!("\n{:<34} {:>9} {:>9} {:>9} {:>6}", "", "median us", "p99 us", "limit us", "limit/");
    row("cache line, there and back", &limit, limit.median);

    for &workers in &counts {
        let busy = PoolOptions { spin_us: 1000, barrier_spin_us: 1000, ..PoolOptions::default() };
        let pool = Pool::new(&plan(&cpus, workers, 1), &busy)?;
        row(
            &format!("empty job, {workers} workers spinning"),
            &empty_job(&pool, rounds, None)?,
            limit.median,
        );
        row(&format!("node barrier, {workers} workers"), &barrier(&pool, rounds, false)?, limit.median);
        if workers > 1 {
            let pool = Pool::new(&plan(&cpus, workers, 2), &busy)?;
            row(
                &format!("root barrier, {workers} workers, 2 nodes"),
                &barrier(&pool, rounds, true)?,
                limit.median,
            );
            let parking = PoolOptions { spin_us: 0, ..PoolOptions::default() };
            let pool = Pool::new(&plan(&cpus, workers, 1), &parking)?;
            let pause = Some(Duration::from_micros(300));
            let times = empty_job(&pool, rounds.min(3000), pause)?;
            row(&format!("empty job, {workers} workers asleep"), &times, limit.median);
        }
    }

    for burners in [0, 1] {
        for work in [Work { tasks: 48, task_us: 20.0 }, Work { tasks: 16, task_us: 2.0 }] {
            throughputs(&cpus, work, burners, if quick { 2 } else { 25 })?;
        }
    }
    Ok(())
}

/// A job of two phases.
#[derive(Clone, Copy)]
struct Work {
    tasks: usize,
    task_us: f64,
}

/// Prints jobs per second by number of workers; the pools take turns, so that what else runs hits all alike.
fn throughputs(cpus: &[u32], work: Work, burners: usize, rounds: usize) -> Result<()> {
    println!(
        "\njobs of 2 phases of {} tasks of {} us; {burners} CPUs shared with a thread that computes without end",
        work.tasks, work.task_us
    );
    let n = cpus.len();
    let mut pools = Vec::new();
    for workers in [n.div_ceil(2), n, 2 * n, 4 * n] {
        for spin_us in [PoolOptions::default().spin_us, 0] {
            let options = PoolOptions { spin_us, ..PoolOptions::default() };
            pools.push((workers, spin_us, Pool::new(&plan(cpus, workers, 1), &options)?, Vec::new()));
        }
    }
    let jobs = (40_000.0 / (work.tasks as f64 * work.task_us)) as u32;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for &cpu in cpus.iter().rev().take(burners) {
            let stop = &stop;
            scope.spawn(move || {
                bind(cpu);
                while !stop.load(Ordering::Relaxed) {
                    black_box(compute(1000.0));
                }
            });
        }
        let result = (0..rounds).try_for_each(|_| {
            pools
                .iter_mut()
                .try_for_each(|(_, _, pool, rates)| throughput(pool, jobs, work).map(|rate| rates.push(rate)))
        });
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    let mut medians = Vec::new();
    for (workers, spin_us, _, mut rates) in pools {
        rates.sort_unstable_by(f64::total_cmp);
        medians.push((workers, spin_us, rates[rates.len() / 2]));
    }
    let best = medians.iter().map(|row| row.2).fold(0.0, f64::max);
    for (workers, spin_us, rate) in medians {
        println!(
            "{workers:>4} workers, spin {spin_us:>3} us {rate:>9.0} jobs/s {:>6.2} of the best",
            rate / best
        );
    }
    Ok(())
}

struct Times {
    median: f64,
    p99: f64,
}

impl Times {
    /// Of samples in nanoseconds, less the cost of reading the clock.
    fn of(mut samples: Vec<u64>) -> Self {
        samples.sort_unstable();
        let at = |part: f64| samples[((samples.len() - 1) as f64 * part) as usize] as f64 / 1e3 - clock_us();
        Self { median: at(0.5).max(0.001), p99: at(0.99).max(0.001) }
    }
}

fn row(name: &str, times: &Times, limit: f64) {
    let Times { median, p99 } = times;
    println!("{name:<34} {median:>9.3} {p99:>9.3} {limit:>9.3} {:>6.2}", limit / median);
}

/// Microseconds per reading of the clock.
fn clock_us() -> f64 {
    static COST: Mutex<Option<f64>> = Mutex::new(None);
    let mut cost = COST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *cost.get_or_insert_with(|| {
        let start = Instant::now();
        for _ in 0..10_000 {
            black_box(Instant::now());
        }
        start.elapsed().as_secs_f64() * 1e6 / 10_001.0
    })
}

/// Round trip of one line between the first and the last CPU.
fn ping_pong(cpus: &[u32], rounds: u32) -> Times {
    let line = CachePadded::new(AtomicU32::new(0));
    let (Some(&first), Some(&last)) = (cpus.first(), cpus.last()) else { return Times::of(vec![0]) };
    if first == last {
        return Times::of(vec![0]);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            bind(last);
            for round in 0..rounds {
                while line.load(Ordering::Acquire) != 2 * round + 1 {
                    spin_loop();
                }
                line.store(2 * round + 2, Ordering::Release);
            }
        });
        let sender = scope.spawn(|| {
            bind(first);
            let trip = |round| {
                let start = Instant::now();
                line.store(2 * round + 1, Ordering::Release);
                while line.load(Ordering::Acquire) != 2 * round + 2 {
                    spin_loop();
                }
                start.elapsed().as_nanos() as u64
            };
            Times::of((0..rounds).map(trip).collect())
        });
        sender.join().unwrap_or(Times { median: f64::NAN, p99: f64::NAN })
    })
}

fn empty_job(pool: &Pool, rounds: u32, pause: Option<Duration>) -> Result<Times> {
    let mut samples = Vec::with_capacity(rounds as usize);
    for _ in 0..rounds {
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
        let start = Instant::now();
        pool.run(&|_| Ok(()))?;
        samples.push(start.elapsed().as_nanos() as u64);
    }
    Ok(Times::of(samples))
}

fn barrier(pool: &Pool, rounds: u32, root: bool) -> Result<Times> {
    let samples = Mutex::new(Vec::with_capacity(rounds as usize));
    pool.run(&|worker| {
        let mut own = Vec::with_capacity(rounds as usize);
        for _ in 0..rounds {
            let start = Instant::now();
            let met = if root { worker.root_barrier() } else { worker.node_barrier() };
            met?;
            own.push(start.elapsed().as_nanos() as u64);
        }
        if worker.index == 0 {
            *samples.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = own;
        }
        Ok(())
    })?;
    Ok(Times::of(samples.into_inner().unwrap_or_default()))
}

/// Jobs per second.
fn throughput(pool: &Pool, jobs: u32, work: Work) -> Result<f64> {
    let steps = steps_per_us() * work.task_us;
    let phases = [StealRange::new(pool.workers()), StealRange::new(pool.workers())];
    let start = Instant::now();
    for _ in 0..jobs {
        for phase in &phases {
            phase.reset(work.tasks);
        }
        pool.run(&|worker| {
            for phase in &phases {
                while worker.claim(phase).is_some() {
                    black_box(compute(steps));
                }
                worker.node_barrier()?;
            }
            Ok(())
        })?;
    }
    Ok(f64::from(jobs) / start.elapsed().as_secs_f64())
}

/// A chain of dependent multiplications: time that no second thread on the core can hide.
fn compute(steps: f64) -> u64 {
    (0..steps as u64).fold(1, |x, i| black_box(x).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(i))
}

fn steps_per_us() -> f64 {
    static RATE: Mutex<Option<f64>> = Mutex::new(None);
    let mut rate = RATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *rate.get_or_insert_with(|| {
        let measure = || {
            let start = Instant::now();
            black_box(compute(1e6));
            1e6 / (start.elapsed().as_secs_f64() * 1e6)
        };
        (0..5).map(|_| measure()).fold(0.0, f64::max)
    })
}

fn plan(cpus: &[u32], workers: usize, nodes: usize) -> WorkerPlan {
    let slot = |index: usize| WorkerSlot { cpus: vec![CpuId(cpus[index % cpus.len()])] };
    let nodes = (0..nodes)
        .map(|node| NodePlan {
            node: NodeId(node as u32),
            workers: (workers * node / nodes..workers * (node + 1) / nodes).map(slot).collect(),
        })
        .collect();
    WorkerPlan { nodes, notes: Vec::new() }
}

fn allowed_cpus() -> Vec<u32> {
    let mut mask = [0_u64; 128];
    // SAFETY: the kernel writes at most the given number of bytes.
    unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) };
    (0..mask.len() as u32 * 64).filter(|cpu| mask[*cpu as usize / 64] >> (cpu % 64) & 1 == 1).collect()
}

fn bind(cpu: u32) {
    let mut mask = [0_u64; 128];
    mask[cpu as usize / 64] = 1 << (cpu % 64);
    // SAFETY: the kernel reads the given number of bytes.
    unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) };
}
