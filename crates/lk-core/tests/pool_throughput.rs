//! What the worker pool loses when there are more workers than CPUs. A binary of its own, since times are compared.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "reads CPU masks")]

mod plans;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lk_core::pool::StealRange;
use plans::{allowed_cpus, pool};

/// One test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The shortest of several runs of `body`: what else runs on the machine lengthens some, a fault of ours all of them.
fn shortest(runs: usize, mut body: impl FnMut()) -> Duration {
    let mut time = || {
        let start = Instant::now();
        body();
        start.elapsed()
    };
    (0..runs).map(|_| time()).min().unwrap()
}

/// More workers than CPUs, sleeping at once: barriers must not cost scheduler ticks.
#[test]
fn oversubscribed_and_parking() {
    let _alone = alone();
    let workers = 4 * allowed_cpus().len();
    let pool = pool(&[workers], 0);
    let took = shortest(20, || {
        for _ in 0..10 {
            pool.run(&|worker| {
                worker.node_barrier()?;
                worker.root_barrier()?;
                Ok(())
            })
            .unwrap();
        }
    });
    // 30 meetings; a scheduler tick is 1 to 4 ms.
    assert!(took < Duration::from_millis(30), "{took:?}");
}

/// Twice and four times as many workers as CPUs do the same work in little more time than one per CPU.
#[test]
fn more_workers_than_cpus_keep_the_throughput() {
    let _alone = alone();
    let cpus = allowed_cpus().len();
    let pools = [cpus, 2 * cpus, 4 * cpus].map(|workers| pool(&[workers], 60));
    let work = |steps: u64| (0..steps).fold(1_u64, |x, i| std::hint::black_box(x).wrapping_mul(31) ^ i);
    let steps = 20_000;
    let tasks = 48 * cpus;
    let phases = pools.each_ref().map(|pool| [(); 2].map(|()| StealRange::new(pool.workers())));
    let mut best = [Duration::MAX; 3];
    // The pools take turns, so that what else runs hits all alike.
    for _ in 0..15 {
        for ((pool, phases), best) in pools.iter().zip(&phases).zip(&mut best) {
            let took = shortest(2, || {
                for phase in phases {
                    phase.reset(tasks);
                }
                pool.run(&|worker| {
                    for phase in phases {
                        while worker.claim(phase).is_some() {
                            std::hint::black_box(work(steps));
                        }
                        worker.node_barrier()?;
                    }
                    Ok(())
                })
                .unwrap();
            });
            *best = took.min(*best);
        }
    }
    let [one, two, four] = best.map(|time| time.as_secs_f64());
    assert!(one / two > 0.7 && one / four > 0.7, "{best:?}");
}
