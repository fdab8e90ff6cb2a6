//! A new program and a new slipgate under traffic.
//!
//! `--bpf-log` loads another build of the programs, so going from one to the other is an upgrade.

use std::time::{Duration, Instant};

use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::SERVER,
};

use super::{
    WAIT, below,
    books::Books,
    eventually, random, rounds,
    scene::{Scene, await_death},
    traffic::{Churn, Stream, expect_whole, paced},
};

/// How it goes from one slipgate to the next.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// SIGTERM with `--on-exit keep`, and the same again.
    Restart,
    /// The same, and the programs are another build's.
    Upgrade,
    /// `kill -9` of both.
    Kill,
}

#[test]
fn nothing_is_lost_over_a_restart_or_an_upgrade() {
    begin!();
    let mut random = random();
    let mut scene = Scene::new(&["--on-exit", "keep"]);
    let mut books = Books::open(&scene);
    let net = &scene.world.net;
    let echo = TcpServer::start(net, (SERVER, 7000), TcpService::Echo).unwrap();
    let close = TcpServer::start(net, (SERVER, 7001), TcpService::Close).unwrap();
    let udp = UdpServer::start(net, (SERVER, 7002), UdpService::Echo).unwrap();
    let pause = Duration::from_millis(2);
    let streams = [
        Stream::start(&scene.guest, echo.address(), 256 << 10, pause),
        Stream::start(&scene.guest, echo.address(), 1_000, pause),
    ];
    let churn = Churn::start(&scene.guest, close.address(), Duration::from_millis(10));
    let (mut gaps, mut logging) = (Vec::new(), false);
    for round in 0..rounds() {
        for way in [Way::Upgrade, Way::Restart, Way::Kill] {
            let span = Duration::from_secs(2);
            let interval = Duration::from_millis(1);
            let datagrams = paced(&scene.guest, udp.address(), span, interval);
            eventually("the flow of datagrams", || {
                let flows = scene.slipgate.flows().unwrap();
                flows
                    .iter()
                    .any(|flow| flow.proto == "udp" && flow.idle_ms < 500)
            });
            std::thread::sleep(Duration::from_micros(below(&mut random, 300_000)));
            let began = Instant::now();
            match way {
                Way::Kill => {
                    books.kills += 1;
                    scene.slipgate.kill_both().unwrap();
                    await_death(&mut scene.slipgate);
                }
                Way::Restart | Way::Upgrade => {
                    let status = scene.slipgate.stop().unwrap();
                    assert!(status.success(), "{status}: {}", scene.slipgate.stderr());
                }
            }
            logging ^= matches!(way, Way::Upgrade);
            let flags = ["--on-exit", "keep", "--bpf-log"];
            scene.restart_with(&flags[..2 + usize::from(logging)]);
            let ended = Instant::now();
            println!("round {round}, {way:?}: {:?}", ended - began);
            gaps.push((began, ended));
            // Connections run their course between two changes, however long these take.
            std::thread::sleep(Duration::from_millis(1_000));
            streams.iter().for_each(Stream::expect_progress);
            let report = datagrams.join().unwrap();
            expect_whole(&report);
            let connect = || tcp::connect_close(close.address(), WAIT);
            scene.guest.run(connect).unwrap();
        }
    }
    let connections = churn.finish(&gaps);
    assert!(connections > 50, "{connections}");
    streams.into_iter().for_each(Stream::finish);
    // The last one takes all away.
    let status = scene.slipgate.stop().unwrap();
    assert!(status.success());
    scene.restart_with(&[]);
    let closed = books.close(&mut scene);
    assert!(closed.records.len() > connections);
}
