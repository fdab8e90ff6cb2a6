//! A new program and a new slipgate under traffic.
//!
//! `--bpf-log` loads another build of the programs, so going from one to the other is an upgrade.

use std::time::{Duration, Instant};

use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use super::{
    BOTH_SERVERS, WAIT, below,
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
    let echo = BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7000), TcpService::Echo).unwrap());
    let close =
        BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7001), TcpService::Close).unwrap());
    let udp = BOTH_SERVERS.map(|ip| UdpServer::start(net, (ip, 7002), UdpService::Echo).unwrap());
    let pause = Duration::from_millis(4);
    let streams = echo.each_ref().map(|echo| {
        let to = echo.address();
        let bulk = Stream::start(&scene.guest, to, 256 << 10, pause);
        [bulk, Stream::start(&scene.guest, to, 1_000, pause)]
    });
    let streams = streams.into_iter().flatten().collect::<Vec<_>>();
    let churn = close
        .each_ref()
        .map(|close| Churn::start(&scene.guest, close.address(), Duration::from_millis(20)));
    let (mut gaps, mut logging) = (Vec::new(), false);
    for round in 0..rounds() {
        for way in [Way::Upgrade, Way::Restart, Way::Kill] {
            let span = Duration::from_secs(2);
            let interval = Duration::from_millis(2);
            let start = |udp: &UdpServer<_>| paced(&scene.guest, udp.address(), span, interval);
            let datagrams = udp.each_ref().map(start);
            eventually("the flows of datagrams", || {
                let flows = scene.slipgate.flows().unwrap();
                let sent = flows
                    .iter()
                    .filter(|flow| flow.proto == "udp" && flow.idle_ms < 500);
                sent.count() >= 2
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
            for datagrams in datagrams {
                expect_whole(&datagrams.join().unwrap());
            }
            for close in &close {
                let connect = || tcp::connect_close(close.address(), WAIT);
                scene.guest.run(connect).unwrap();
            }
        }
    }
    let connections = churn.map(|churn| churn.finish(&gaps));
    assert!(connections.iter().all(|of| *of > 25), "{connections:?}");
    streams.into_iter().for_each(Stream::finish);
    // The last one takes all away.
    let status = scene.slipgate.stop().unwrap();
    assert!(status.success());
    scene.restart_with(&[]);
    let closed = books.close(&mut scene);
    assert!(closed.records.len() > connections.iter().sum());
}
