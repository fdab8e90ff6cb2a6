//! Thousands of streams over a link that loses, duplicates and reorders, from ports that are used
//! again and again, with SYNs sent twice and verdicts that change under way.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use slipgate_testbed::{
    Direction, Guest, GuestConfig, Result, Uplink, WorldConfig,
    clients::tcp,
    frame::{Packet, tcp_flags},
    impairment::{Impairment, SplitMix64},
    pump::Fate,
    servers::{TcpServer, TcpService},
    tap::VnetHdr,
};

use super::{BOTH_SERVERS, below, books::Books, flips::Flips, in_turn, knob, random, scene::Scene};

const AT_ONCE: u64 = 64;
const FIRST_PORT: u16 = 20_000;
/// A SYN may be lost several times in a row, and so may a FIN.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn streams_over_a_bad_link_are_whole() {
    begin!();
    let connections = knob("SLIPGATE_STRESS_CONNECTIONS", 10_000);
    let mut random = random();
    let world = WorldConfig {
        uplink: Uplink::Impaired(Impairment::rough(random.next())),
        ..Default::default()
    };
    let mut scene = Scene::with(world, GuestConfig::new("tap0"), &[]);
    let net = &scene.world.net;
    let servers =
        BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7000), TcpService::Streams).unwrap());
    let books = Books::open(&scene);
    repeat_some_syns(&scene.guest, SplitMix64(random.next()));
    let flips = Flips::start(scene.maps(), SplitMix64(random.next()));

    let next = AtomicU64::new(0);
    let work = |worker: u64, mut random: SplitMix64| -> Result<()> {
        let server = in_turn(&servers, worker as usize).address();
        while next.fetch_add(1, SeqCst) < connections {
            one_stream(server, FIRST_PORT + worker as u16, &mut random)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE)
            .map(|worker| {
                let (random, guest) = (SplitMix64(random.next()), &scene.guest);
                scope.spawn(move || guest.run(|| work(worker, random)))
            })
            .collect();
        for worker in workers {
            if let Err(error) = worker.join().unwrap() {
                panic!("{error}; stats: {:#}", scene.slipgate.stats().unwrap());
            }
        }
    });
    let flips = flips.finish();
    scene.guest.set_filter(None).unwrap();
    let [out, into] = [Direction::Out, Direction::In].map(|way| scene.world.impaired(way));
    let closed = books.close(&mut scene);
    let used_again = closed.records.len() as u64;
    println!(
        "{connections} streams in {used_again} flows, {flips} verdicts changed; the link: {out:?} \
         out, {into:?} in; drops {}, lost {}",
        closed.stats["drops"], closed.stats["lost_after_redirect"]
    );
    assert!(closed.records.len() as u64 >= connections);
    assert!(flips > 0 && out.lost > 0 && into.duplicated > 0 && into.reordered > 0);
    let accepted = servers.each_ref().map(TcpServer::accepted);
    println!("by IPv4 and IPv6: {accepted:?}");
    assert_eq!(accepted.iter().sum::<u64>(), connections);
    assert!(accepted.iter().all(|of| *of > connections / 4));
}

/// Down from a port of the worker's own, so that its tuple is used again at once; or up from any.
fn one_stream(server: SocketAddr, port: u16, random: &mut SplitMix64) -> Result<()> {
    let len = match below(random, 10) {
        0 => below(random, 400_000),
        _ => below(random, 20_000),
    };
    let seed = random.next();
    if below(random, 3) == 0 {
        return tcp::upload(server, len, seed, PATIENCE).map(drop);
    }
    let stream = tcp::connect_from(port, server, PATIENCE)?;
    tcp::download_over(stream, len, seed).map(drop)
}

/// One in eight SYNs leaves the guest twice.
fn repeat_some_syns(guest: &Guest, mut random: SplitMix64) {
    let filter = move |direction: Direction, _: &VnetHdr, frame: &[u8]| {
        let flags = Packet::parse_ethernet(frame).and_then(|packet| packet.tcp_flags());
        let is_syn = flags.is_some_and(|flags| flags & tcp_flags::SYN != 0);
        match is_syn && direction == Direction::Out && below(&mut random, 8) == 0 {
            true => Fate::Repeat(2),
            false => Fate::Pass,
        }
    };
    guest.set_filter(Some(Box::new(filter))).unwrap();
}
