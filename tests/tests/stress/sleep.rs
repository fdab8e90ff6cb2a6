//! A VM that sleeps and wakes at random, with clients that know nothing of it.
use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    clients::{tcp, tcp::EchoSession, udp},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::HOST,
};

use super::{GUEST, WAIT, at, below, books::Books, knob, random, scene::Scene};

/// Time between two connects, and between two datagrams.
const INTERVAL: Duration = Duration::from_millis(20);
/// Longest sleep, and longest time awake, milliseconds.
const LONGEST_SLEEP_MS: u64 = 400;
const LONGEST_AWAKE_MS: u64 = 200;

#[test]
fn none_of_those_who_come_for_a_vm_that_sleeps_now_and_then_is_lost() {
    begin!();
    let clients = knob("SLIPGATE_STRESS_KNOCKS", 250);
    let mut random = random();
    let mut scene = Scene::new(&["--forward", "tcp:8080:80", "--forward", "udp:5353:53"]);
    let server = TcpServer::start(&scene.guest.ns, (GUEST, 80), TcpService::Echo).unwrap();
    let _echo = UdpServer::start(&scene.guest.ns, (GUEST, 53), UdpService::Echo).unwrap();
    let books = Books::open(&scene);
    let (is_over, longest_us) = (AtomicBool::new(false), AtomicU64::new(0));
    let (http, echo) = (at(HOST, 8080), at(HOST, 5353));
    let sleeps = std::thread::scope(|scope| {
        let (slipgate, net) = (&scene.slipgate, &scene.world.net);
        let (is_over, longest_us) = (&is_over, &longest_us);
        let sleeper = scope.spawn(move || {
            let mut pause = |most| Duration::from_millis(1 + below(&mut random, most));
            let mut sleeps = 0;
            while !is_over.load(SeqCst) {
                slipgate.run(&["sleep", "tap0"]).unwrap();
                std::thread::sleep(pause(LONGEST_SLEEP_MS));
                slipgate.run(&["resume", "tap0"]).unwrap();
                std::thread::sleep(pause(LONGEST_AWAKE_MS));
                sleeps += 1;
            }
            sleeps
        });
        let datagrams =
            scope.spawn(move || net.run(|| udp::paced(echo, clients, 64, INTERVAL, WAIT)));
        let began = Instant::now();
        let connects: Vec<_> = (0..clients as u32)
            .map(|number| {
                let due = began + INTERVAL * number;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                scope.spawn(move || {
                    let began = Instant::now();
                    let mut stream = net.run(|| tcp::connect(http, WAIT))?;
                    let took_us = began.elapsed().as_micros() as u64;
                    longest_us.fetch_max(took_us, SeqCst);
                    EchoSession::new(&mut stream).round(1_000)
                })
            })
            .collect();
        for connect in connects {
            connect.join().unwrap().unwrap();
        }
        let report = datagrams.join().unwrap().unwrap();
        is_over.store(true, SeqCst);
        assert_eq!((report.lost(), report.corrupt), (0, 0), "{report:?}");
        sleeper.join().unwrap()
    });
    let closed = books.close(&mut scene);
    let longest = Duration::from_micros(longest_us.load(SeqCst));
    println!(
        "{sleeps} sleeps, the longest connect took {longest:?}; drops {}",
        closed.stats["drops"]
    );
    assert!(sleeps > 1);
    assert_eq!(server.accepted(), clients);
}
