//! Models of the pool's protocols, explored by loom over all interleavings (with a bound on preemptions):
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_PROFILE_RELEASE_LTO=off CARGO_TARGET_DIR=target/loom \
//!     cargo test -p lk-core --release --lib loom_
//! ```
//!
//! Spin limits are zero in most models, so that threads fall asleep whenever they can: that is where wake-ups get lost.

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::barrier::{Aborted, Barrier};
use super::gate::{Gate, SpinBudget};
use super::shared::Shared;
use super::steal::StealRange;
use crate::Error;

fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

fn no_spin() -> SpinBudget {
    SpinBudget::new(Duration::ZERO, false)
}

/// Data written before `advance` is seen after `wait`, by spinning and by sleeping waiters, in two generations.
#[test]
fn loom_gate_wakes_all() {
    model(3, || {
        let shared = Arc::new((Gate::new(), UnsafeCell::new(0)));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let ticket = super::gate::Ticket::FIRST;
                    shared.0.wait(ticket, &no_spin());
                    // SAFETY: written once, before the advance that `wait` acquired.
                    assert_eq!(shared.1.with(|value| unsafe { *value }), 7);
                })
            })
            .collect();
        // SAFETY: readers come after the advance.
        shared.1.with_mut(|value| unsafe { *value = 7 });
        shared.0.advance();
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

/// Three sleepers: more than the releaser wakes itself, so one must be woken by another.
#[test]
fn loom_gate_wakes_as_a_tree() {
    model(2, || {
        let gate = Arc::new(Gate::new());
        let ticket = gate.ticket();
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || gate.wait(ticket, &no_spin()))
            })
            .collect();
        gate.advance();
        for waiter in waiters {
            assert_ne!(waiter.join().unwrap(), ticket);
        }
    });
}

/// An abort reaches sleepers whether or not the gate advances at the same time.
#[test]
fn loom_gate_abort_races_with_advance() {
    model(3, || {
        let gate = Arc::new(Gate::new());
        let ticket = gate.ticket();
        let waiter = thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.wait(ticket, &no_spin())
        });
        let aborter = thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.abort()
        });
        gate.advance();
        waiter.join().unwrap();
        aborter.join().unwrap();
        assert!(gate.ticket().is_aborted());
        gate.clear_abort();
        assert!(!gate.ticket().is_aborted() && gate.ticket() != ticket);
    });
}

/// Two rounds of a barrier order plain writes of both sides.
#[test]
fn loom_barrier_orders_phases() {
    model(3, || {
        let shared = Arc::new((Barrier::new(2), [UnsafeCell::new(0), UnsafeCell::new(0)]));
        let body = |(barrier, cells): &(Barrier, [UnsafeCell<i32>; 2]), me: usize| {
            for round in 1..=2 {
                // SAFETY: own cell; the other side reads it between the two barriers of a round only.
                cells[me].with_mut(|cell| unsafe { *cell = round });
                barrier.wait(&no_spin()).unwrap();
                // SAFETY: no writes between the two barriers.
                assert_eq!(cells[1 - me].with(|cell| unsafe { *cell }), round);
                barrier.wait(&no_spin()).unwrap();
            }
        };
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || body(&shared, 1)
        });
        body(&shared, 0);
        other.join().unwrap();
    });
}

/// A waiter leaves an aborted barrier at whatever moment the abort comes.
#[test]
fn loom_barrier_abort_releases_waiters() {
    model(3, || {
        let barrier = Arc::new(Barrier::new(3));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let barrier = Arc::clone(&barrier);
                thread::spawn(move || barrier.wait(&no_spin()))
            })
            .collect();
        barrier.abort();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Err(Aborted));
        }
        barrier.reset();
        assert!(matches!(barrier.arrive(), Ok(super::barrier::Arrival::Early(_))));
    });
}

/// Runs `body` as the caller of a pool with the given nodes, then ends the worker threads.
fn with_workers(node_workers: &[usize], body: impl FnOnce(&Shared)) {
    let shared = Arc::new(Shared::new(node_workers, Duration::ZERO, Duration::ZERO, false));
    let threads: Vec<_> = (1..node_workers.iter().sum())
        .map(|index| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.work(index))
        })
        .collect();
    body(&shared);
    shared.stop();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Job hand-out, completion and shutdown: every job runs once on every worker, borrows from the caller's stack,
/// and what workers wrote without synchronisation of their own is there when `dispatch` returns.
#[test]
fn loom_jobs_are_handed_out_and_end() {
    jobs(3, 2, &[2]);
    // Two threads of one node, and one thread on each of two: every counter has more than one writer.
    jobs(1, 1, &[3]);
    jobs(1, 1, &[1, 1, 1]);
}

fn jobs(preemptions: usize, rounds: i32, node_workers: &'static [usize]) {
    model(preemptions, move || {
        with_workers(node_workers, |shared| {
            for round in 0..rounds {
                let cells: Vec<_> = shared.workers.iter().map(|_| UnsafeCell::new(0)).collect();
                let cells = Cells(&cells);
                shared.dispatch(&|worker| {
                    // SAFETY: one worker per cell; the caller looks after the job.
                    cells.at(worker.index).with_mut(|cell| unsafe { *cell = round + 1 });
                    Ok(())
                });
                assert!(shared.outcome().is_none());
                for cell in cells.0 {
                    // SAFETY: all workers have left the job.
                    assert_eq!(cell.with(|cell| unsafe { *cell }), round + 1);
                }
            }
        });
    });
}

/// As above over two nodes, with a root barrier inside.
#[test]
fn loom_root_barrier_meets_over_nodes() {
    root_barrier(3, &[1, 1]);
    root_barrier(1, &[1, 2]);
}

fn root_barrier(preemptions: usize, node_workers: &'static [usize]) {
    model(preemptions, move || {
        with_workers(node_workers, |shared| {
            let cells: Vec<_> = shared.workers.iter().map(|_| UnsafeCell::new(0)).collect();
            let cells = Cells(&cells);
            shared.dispatch(&|worker| {
                // SAFETY: one worker per cell until the barrier.
                cells.at(worker.index).with_mut(|cell| unsafe { *cell = 1 });
                worker.root_barrier()?;
                for cell in cells.0 {
                    // SAFETY: only reads after the barrier.
                    assert_eq!(cell.with(|cell| unsafe { *cell }), 1);
                }
                Ok(())
            });
            assert!(shared.outcome().is_none());
        });
    });
}

/// A worker fails while the others are on their way into barriers: the job ends, the first failure is kept and the
/// next job finds the barriers in order.
#[test]
fn loom_failing_job_ends_and_the_next_runs() {
    failing_job(2, &[2]);
    failing_job(1, &[1, 1]);
}

fn failing_job(preemptions: usize, node_workers: &'static [usize]) {
    model(preemptions, move || {
        with_workers(node_workers, |shared| {
            shared.dispatch(&|worker| {
                if worker.index == 1 {
                    return Err(Error::Argument("first".to_owned()));
                }
                worker.root_barrier()?;
                Ok(())
            });
            let failure = shared.outcome().unwrap();
            assert_eq!((failure.worker, failure.error.to_string().as_str()), (1, "first"));
            shared.dispatch(&|worker| Ok(worker.root_barrier()?));
            assert!(shared.outcome().is_none());
        });
    });
}

/// Owner and thieves empty three ranges: each task once, none left.
#[test]
fn loom_steal_claims_each_task_once() {
    model(2, || {
        let ranges = Arc::new(StealRange::new(3));
        ranges.reset_with(|owner| [0..2, 2..3, 3..3][owner].clone());
        let seen: Arc<[AtomicUsize; 3]> = Arc::new(std::array::from_fn(|_| AtomicUsize::new(0)));
        let drain = |ranges: &StealRange, seen: &[AtomicUsize; 3], me| {
            while let Some(task) = ranges.claim(me) {
                seen[task].fetch_add(1, Ordering::Relaxed);
            }
        };
        let threads: Vec<_> = (1..3)
            .map(|me| {
                let (ranges, seen) = (Arc::clone(&ranges), Arc::clone(&seen));
                thread::spawn(move || drain(&ranges, &seen, me))
            })
            .collect();
        drain(&ranges, &seen, 0);
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    });
}

/// Cells that the workers of a job write one each.
struct Cells<'a>(&'a [UnsafeCell<i32>]);

// SAFETY: loom's cell checks that accesses don't overlap, which is what the models are about.
unsafe impl Sync for Cells<'_> {}

impl Cells<'_> {
    fn at(&self, index: usize) -> &UnsafeCell<i32> {
        &self.0[index]
    }
}
