//! The worker pool through its public interface.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "forks and reads CPU masks")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lk_core::pool::{Pool, PoolOptions, StealRange};
use lk_core::topology::{CpuId, NodeId, NodePlan, WorkerPlan, WorkerSlot};
use lk_core::{Error, Result};

mod plans;
use plans::{allowed_cpus, options, plan, pool};

fn bind_current_thread(cpu: u32) {
    let mut mask = [0_u64; 128];
    mask[cpu as usize / 64] = 1 << (cpu % 64);
    // SAFETY: the kernel reads the given number of bytes.
    let status = unsafe { libc::sched_setaffinity(0, std::mem::size_of_val(&mask), mask.as_ptr().cast()) };
    assert_eq!(status, 0);
}

/// CPU time of the calling thread.
fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn every_worker_runs_every_job_once_and_knows_its_place() {
    for spin_us in [0, 50] {
        let pool = pool(&[2, 1, 3], spin_us);
        assert_eq!(pool.workers(), 6);
        assert_eq!(pool.node_workers().collect::<Vec<_>>(), [2, 1, 3]);
        let runs: Vec<AtomicUsize> = (0..6).map(|_| AtomicUsize::new(0)).collect();
        for epoch in 0..200 {
            pool.run(&|worker| {
                let first = [0, 2, 3][worker.node];
                assert_eq!(worker.index, first + worker.index_in_node);
                assert_eq!(worker.node_workers, [2, 1, 3][worker.node]);
                assert_eq!((worker.nodes, worker.workers), (3, 6));
                assert_eq!(runs[worker.index].fetch_add(1, Ordering::Relaxed), epoch);
                Ok(())
            })
            .unwrap();
        }
        assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 200));
    }
}

#[test]
fn one_worker_is_the_caller_alone() {
    let pool = pool(&[1], 50);
    let caller = thread::current().id();
    let mut seen = Mutex::new(None);
    pool.run(&|worker| {
        worker.node_barrier()?;
        worker.root_barrier()?;
        *seen.lock().unwrap() = Some(thread::current().id());
        Ok(())
    })
    .unwrap();
    assert_eq!(*seen.get_mut().unwrap(), Some(caller));
}

#[test]
fn phases_are_separated_by_barriers() {
    let pool = pool(&[2, 2], 20);
    let node = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let root = AtomicUsize::new(0);
    for _ in 0..300 {
        pool.run(&|worker| {
            for round in 1..=4 {
                node[worker.node].fetch_add(1, Ordering::Relaxed);
                worker.node_barrier()?;
                assert_eq!(node[worker.node].load(Ordering::Relaxed), round * 2);
                root.fetch_add(1, Ordering::Relaxed);
                worker.root_barrier()?;
                assert_eq!(root.load(Ordering::Relaxed), round * 4);
                worker.root_barrier()?;
            }
            if worker.index == 0 {
                root.store(0, Ordering::Relaxed);
                for n in &node {
                    n.store(0, Ordering::Relaxed);
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn panic_poisons_and_nobody_hangs() {
    for culprit in 0..4 {
        let pool = pool(&[2, 2], 20);
        let result = pool.run(&|worker| {
            assert!(worker.index != culprit, "panel 7 is on fire");
            worker.node_barrier()?;
            worker.root_barrier()?;
            Ok(())
        });
        let Err(Error::Poisoned { worker, message }) = result else { panic!("{result:?}") };
        assert_eq!((worker, message.as_str()), (culprit, "panel 7 is on fire"));
        for _ in 0..2 {
            let again = pool.run(&|_| unreachable!());
            assert!(matches!(again, Err(Error::Poisoned { worker, message })
                if worker == culprit && message == "panel 7 is on fire"));
        }
    }
}

#[test]
fn error_ends_the_job_and_pool_stays_usable() {
    let pool = pool(&[2, 2], 20);
    for culprit in (0..4).cycle().take(200) {
        let result: Result<()> = pool.run(&|worker| {
            worker.node_barrier()?;
            if worker.index == culprit {
                return Err(Error::Argument(format!("expert {culprit}")));
            }
            worker.root_barrier()?;
            worker.node_barrier()?;
            Ok(())
        });
        assert!(matches!(result, Err(Error::Argument(text)) if text == format!("expert {culprit}")));
        pool.run(&|worker| Ok(worker.root_barrier()?)).unwrap();
    }
}

#[test]
fn stealing_claims_each_task_once() {
    let pool = pool(&[3], 20);
    let ranges = StealRange::new(3);
    let seen: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
    for round in 1..=200 {
        ranges.reset(seen.len());
        pool.run(&|worker| {
            while let Some(task) = worker.claim(&ranges) {
                seen[task].fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        })
        .unwrap();
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == round));
    }
}

#[test]
fn tasks_of_a_slow_worker_are_taken_by_the_others() {
    let pool = pool(&[2], 20);
    let ranges = StealRange::new(2);
    ranges.reset(100);
    let done = [AtomicUsize::new(0), AtomicUsize::new(0)];
    pool.run(&|worker| {
        while worker.claim(&ranges).is_some() {
            done[worker.index].fetch_add(1, Ordering::Relaxed);
            thread::sleep(if worker.index == 0 {
                Duration::from_millis(1)
            } else {
                Duration::from_millis(9)
            });
        }
        Ok(())
    })
    .unwrap();
    let [fast, slow] = done.map(AtomicUsize::into_inner);
    assert_eq!(fast + slow, 100);
    assert!(fast > 3 * slow, "fast {fast}, slow {slow}");
}

#[test]
fn calls_from_several_threads_run_one_after_the_other() {
    let pool = pool(&[2, 1], 20);
    let inside = AtomicUsize::new(0);
    let jobs = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    pool.run(&|worker| {
                        if worker.index == 0 {
                            assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        }
                        worker.root_barrier()?;
                        assert_eq!(inside.load(Ordering::Relaxed), 1);
                        worker.root_barrier()?;
                        if worker.index == 0 {
                            inside.store(0, Ordering::Relaxed);
                            jobs.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(())
                    })
                    .unwrap();
                }
            });
        }
    });
    assert_eq!(jobs.into_inner(), 400);
}

#[test]
fn pools_are_independent() {
    let pools = [pool(&[2], 20), pool(&[1, 1], 0)];
    thread::scope(|scope| {
        for pool in &pools {
            scope.spawn(move || {
                for _ in 0..500 {
                    pool.run(&|worker| Ok(worker.root_barrier()?)).unwrap();
                }
            });
        }
    });
    // A job may use another pool, and not its own.
    pools[0]
        .run(&|worker| {
            if worker.index == 0 {
                pools[1].run(&|inner| Ok(inner.root_barrier()?))?;
            }
            Ok(())
        })
        .unwrap();
    for culprit in 0..2 {
        let nested =
            pools[0].run(&|worker| if worker.index == culprit { pools[0].run(&|_| Ok(())) } else { Ok(()) });
        assert!(matches!(nested, Err(Error::Argument(_))), "{nested:?}");
    }
}

/// Runs `body` on a new thread that is bound to `cpu`.
fn on_cpu(cpu: u32, body: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            bind_current_thread(cpu);
            body();
            assert_eq!(allowed_cpus(), [cpu], "the caller's mask was changed");
        });
    });
}

#[test]
fn workers_are_bound_and_the_caller_is_not() {
    let before = allowed_cpus();
    let plan = plan(&[2, 2]);
    let pool = Pool::new(&plan, &PoolOptions::default()).unwrap();
    assert!(pool.notes().is_empty(), "{:?}", pool.notes());
    pool.run(&|worker| {
        let name = thread::current().name().unwrap_or_default().to_owned();
        if worker.index == 0 {
            assert_eq!(allowed_cpus(), before);
            assert!(!name.starts_with("lk-"));
        } else {
            assert_eq!(name, format!("lk-{}-{}", worker.node, worker.index_in_node));
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(allowed_cpus(), before);
    // On the CPU of slot 0 the caller is in nobody's way.
    on_cpu(plan.nodes[0].workers[0].cpus[0].0, || {
        pool.run(&|worker| {
            let slot = &plan.nodes[worker.node].workers[worker.index_in_node];
            assert_eq!(allowed_cpus(), slot.cpus.iter().map(|cpu| cpu.0).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn caller_and_worker_do_not_share_a_cpu() {
    let cpus = allowed_cpus();
    if cpus.len() < 2 {
        // One CPU is every worker's.
        return;
    }
    let plan = WorkerPlan {
        nodes: vec![NodePlan {
            node: NodeId(0),
            workers: cpus.iter().map(|&cpu| WorkerSlot { cpus: vec![CpuId(cpu)] }).collect(),
        }],
        notes: Vec::new(),
    };
    let pool = Pool::new(&plan, &PoolOptions::default()).unwrap();
    for &cpu in cpus.iter().rev().chain(&cpus) {
        on_cpu(cpu, || {
            for _ in 0..20 {
                let taken: Vec<AtomicUsize> = cpus.iter().map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|worker| {
                    let [own] = allowed_cpus()[..] else { panic!("worker {} is not bound", worker.index) };
                    taken[cpus.iter().position(|&cpu| cpu == own).unwrap()].fetch_add(1, Ordering::Relaxed);
                    Ok(())
                })
                .unwrap();
                assert!(taken.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{taken:?}");
            }
        });
    }
}

#[test]
fn binding_to_an_absent_cpu_degrades_with_one_note() {
    let mut plan = plan(&[3]);
    for slot in &mut plan.nodes[0].workers[1..] {
        slot.cpus = vec![CpuId(8000)];
    }
    let pool = Pool::new(&plan, &PoolOptions::default()).unwrap();
    assert_eq!(pool.notes().len(), 1);
    assert!(pool.notes()[0].contains("2 of 2") && pool.notes()[0].contains("8000"), "{:?}", pool.notes());
    pool.run(&|worker| Ok(worker.root_barrier()?)).unwrap();
}

#[test]
fn bad_plans_are_refused() {
    for nodes in [&[][..], &[2, 0]] {
        let result = Pool::new(&plan(nodes), &PoolOptions::default());
        assert!(matches!(result, Err(Error::Config(_))));
    }
}

#[test]
fn drop_ends_the_threads_in_every_state() {
    let drop_time = |pool: Arc<Pool>| {
        let start = Instant::now();
        drop(pool);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
    };
    drop_time(pool(&[2, 2], 50));
    let parked = pool(&[2, 2], 0);
    parked.run(&|_| Ok(())).unwrap();
    thread::sleep(Duration::from_millis(20));
    drop_time(parked);
    let spinning = pool(&[2, 2], 100_000);
    spinning.run(&|_| Ok(())).unwrap();
    drop_time(spinning);
    let poisoned = pool(&[2, 2], 50);
    poisoned
        .run(&|worker| {
            assert!(worker.index != 3);
            Ok(())
        })
        .unwrap_err();
    drop_time(poisoned);
}

#[test]
fn idle_workers_sleep() {
    let pool = pool(&[2], 60);
    let cpu_time = || {
        let time = Mutex::new(Duration::ZERO);
        pool.run(&|worker| {
            if worker.index == 1 {
                *time.lock().unwrap() = thread_cpu_time();
            }
            Ok(())
        })
        .unwrap();
        time.into_inner().unwrap()
    };
    let before = cpu_time();
    thread::sleep(Duration::from_millis(300));
    let used = cpu_time().saturating_sub(before);
    assert!(used < Duration::from_millis(3), "{used:?} of CPU time in 300 ms without a job");
}

/// Jobs that arrive around the moment when workers fall asleep.
#[test]
fn no_wake_up_is_lost() {
    for (spin_us, rounds) in [(0, 100_000), (1, 400_000), (5, 500_000)] {
        let pool = pool(&[2], spin_us);
        let count = AtomicUsize::new(0);
        let mut random = 1_u32;
        for _ in 0..rounds {
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            })
            .unwrap();
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            for _ in 0..random >> 26 {
                std::hint::spin_loop();
            }
        }
        assert_eq!(count.into_inner(), 2 * rounds);
    }
}

#[test]
fn hang_at_a_barrier_times_out_with_the_state() {
    let pool = pool(&[2, 1], 20);
    let limit = Duration::from_millis(100);
    pool.run_with_timeout(&|worker| Ok(worker.root_barrier()?), limit).unwrap();
    let start = Instant::now();
    let result = pool.run_with_timeout(
        &|worker| {
            if worker.index == 1 {
                while !worker.is_aborted() {
                    thread::yield_now();
                }
                return Ok(());
            }
            Ok(worker.root_barrier()?)
        },
        limit,
    );
    let took = start.elapsed();
    assert!(took > limit && took < Duration::from_secs(5), "{took:?}");
    let Err(Error::Timeout(text)) = result else { panic!("{result:?}") };
    assert!(text.contains("worker 1 running") && text.contains("worker 0 in root barrier"), "{text}");
    let later = pool.run(&|_| Ok(()));
    assert!(matches!(later, Err(Error::Poisoned { worker: 1, message }) if message.contains("no progress")));
}

#[test]
fn progress_keeps_a_slow_job_alive() {
    let pool = pool(&[2], 20);
    let limit = Duration::from_millis(400);
    pool.run_with_timeout(
        &|worker| {
            for _ in 0..30 {
                thread::sleep(Duration::from_millis(30));
                if worker.index == 1 {
                    worker.progress();
                }
            }
            Ok(())
        },
        limit,
    )
    .unwrap();
    let before = pool.heartbeats();
    pool.run(&|worker| Ok(worker.node_barrier()?)).unwrap();
    assert!(pool.heartbeats().iter().zip(&before).all(|(now, before)| now > before));
}

#[test]
fn owner_is_told_of_a_stuck_job() {
    let released = Arc::new(AtomicBool::new(false));
    let (told, flag) = (Arc::new(Mutex::new(String::new())), Arc::clone(&released));
    let text = Arc::clone(&told);
    let on_stuck = move |state: &str| {
        *text.lock().unwrap() = state.to_owned();
        flag.store(true, Ordering::Release);
    };
    let options = PoolOptions { on_stuck: Some(Arc::new(on_stuck)), ..PoolOptions::default() };
    let pool = Pool::new(&plan(&[2]), &options).unwrap();
    let result = pool.run_with_timeout(
        &|worker| {
            // Heeds neither barrier nor abort, as a hung system call would.
            while worker.index == 1 && !released.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        },
        Duration::from_millis(50),
    );
    assert!(matches!(result, Err(Error::Timeout(_))), "{result:?}");
    assert!(told.lock().unwrap().contains("worker 1 running"));
}

/// Runs `child` in a forked child and returns its exit status; fails if it does not end.
fn in_forked_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `child` and leaves by `_exit`; the C library keeps its allocator usable after fork.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(code) }
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut status = 0;
    loop {
        // SAFETY: waits for the child made above.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        if ended == pid {
            return if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 };
        }
        if Instant::now() > deadline {
            // SAFETY: the child is ours and not yet waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the child hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn forked_child_is_told_and_may_make_its_own_pool() {
    let used = pool(&[2, 1], 20);
    used.run_with_timeout(&|_| Ok(()), Duration::from_secs(10)).unwrap();
    let code = in_forked_child(|| {
        let Err(Error::Forked(text)) = used.run(&|_| Ok(())) else { return 1 };
        if !text.contains("spawn") {
            return 2;
        }
        let Ok(own) = Pool::new(&plan(&[2]), &options(20)) else { return 3 };
        if own.run(&|worker| Ok(worker.root_barrier()?)).is_err() {
            return 4;
        }
        0
    });
    assert_eq!(code, 0);
    used.run(&|worker| Ok(worker.root_barrier()?)).unwrap();
}

#[test]
fn drop_in_a_forked_child_returns() {
    let pool = Mutex::new(Some(pool(&[2], 20)));
    pool.lock().unwrap().as_ref().unwrap().run_with_timeout(&|_| Ok(()), Duration::from_secs(10)).unwrap();
    let code = in_forked_child(|| {
        drop(pool.lock().unwrap().take());
        7
    });
    assert_eq!(code, 7);
}
