//! A machine whose guest is paused and whose VM sleeps: who comes for it has its answer by the guest when
//! it is resumed.
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    MicroVm, NetNs, clients::tcp, require_kvm, require_root_and_tun, slipgate, world::HOST,
};

use crate::{
    Bed, WAIT, eventually,
    ordered_by_api::{Stand, await_event},
};

/// A server workload with its ports on the host.
const FLAGS: [&str; 8] = [
    "--memory",
    "64",
    "--cmdline",
    "serve 7 600s",
    "--forward",
    "tcp:8080:7",
    "--forward",
    "udp:5353:7",
];
const DATAGRAMS: u8 = 5;

/// Clients in the world, with a live flow each.
struct Clients {
    net: NetNs,
    stream: TcpStream,
    datagrams: UdpSocket,
}

impl Clients {
    fn of(bed: &Bed) -> Self {
        let net = bed.world.net.clone();
        // A guest resets it until its workload has begun.
        let mut stream = None;
        eventually("it serves", || {
            stream = net.run(|| tcp::connect((HOST, 8080), WAIT)).ok();
            stream.is_some()
        });
        let mut stream = stream.unwrap();
        echo(&mut stream, b"before it sleeps");
        let datagrams = net.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        datagrams.connect((HOST, 5353)).unwrap();
        datagrams.set_read_timeout(Some(WAIT)).unwrap();
        datagrams.send(&[0]).unwrap();
        assert_eq!(datagrams.recv(&mut [0; 8]).unwrap(), 1);
        Self {
            net,
            stream,
            datagrams,
        }
    }

    /// All of them come while the guest is paused: a client that connects, one that sends on a live
    /// connection, and datagrams. `knocked` returns once that was noticed, and `resume` resumes the guest.
    fn come(&mut self, knocked: impl FnOnce(), resume: impl FnOnce()) {
        let began = Instant::now();
        let net = &self.net;
        std::thread::scope(|scope| {
            let connects = scope.spawn(|| net.run(|| tcp::connect((HOST, 8080), WAIT)));
            knocked();
            self.stream.write_all(b"while it sleeps").unwrap();
            for number in 1..=DATAGRAMS {
                self.datagrams.send(&[number]).unwrap();
            }
            self.datagrams
                .set_read_timeout(Some(Duration::from_millis(200)))
                .unwrap();
            let answer = self.datagrams.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(answer.kind(), ErrorKind::WouldBlock);
            assert!(!connects.is_finished(), "somebody answered for the guest");
            resume();
            let asleep = began.elapsed();
            let mut stream = connects.join().unwrap().unwrap();
            let took = began.elapsed();
            let repeated = tcp::repeated(&stream).unwrap();
            println!("asleep for {asleep:?}, connected after {took:?}");
            // Its SYN itself was answered; a client repeats it after a second.
            if took < Duration::from_millis(900) {
                assert_eq!(repeated, 0, "its SYN was lost");
            }
            assert!(took < asleep + WAIT / 2, "{took:?}");
            echo(&mut stream, b"when it has woken");
        });
        let mut echoed = [0; 15];
        self.stream.read_exact(&mut echoed).unwrap();
        assert_eq!(&echoed, b"while it sleeps");
        self.datagrams.set_read_timeout(Some(WAIT)).unwrap();
        for number in 1..=DATAGRAMS {
            let mut echoed = [0; 8];
            let len = self.datagrams.recv(&mut echoed).unwrap();
            assert_eq!(echoed[..len], [number], "lost, or out of order");
        }
    }
}

fn echo(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut echoed = vec![0; bytes.len()];
    stream.read_exact(&mut echoed).unwrap();
    assert_eq!(echoed, bytes);
}

/// Runs `slipgate VERB web` for the VM of these pins.
#[track_caller]
fn have(bed: &Bed, verb: &str) {
    let said = slipgate::run(&bed.world.host, &bed.pins, &[verb, "web"]);
    said.unwrap_or_else(|error| panic!("{verb}: {error}"));
}

/// Puts the machine `web` to sleep, as a platform does, and wakes it for who comes.
fn sleeps(bed: &Bed, vm: &MicroVm, clients: &mut Clients, knocked: impl FnOnce()) {
    have(bed, "sleep");
    bed.have(&["pause", "web"]);
    assert_eq!(bed.status(vm)["state"], "paused");
    clients.come(knocked, || have(bed, "resume"));
    assert_eq!(bed.status(vm)["state"], "running");
}

/// Waits until no packet of a flow comes any more: twice as long as Linux delays an acknowledgement.
fn await_quiet(stand: &Stand) {
    let packets = || {
        let flows = stand.daemon.flows().unwrap();
        let counted = flows.iter().map(|flow| flow.tx_packets + flow.rx_packets);
        counted.sum::<u64>()
    };
    let mut before = packets();
    eventually("no packet comes", || {
        std::thread::sleep(Duration::from_millis(400));
        let now = packets();
        std::mem::replace(&mut before, now) == now
    });
}

#[test]
fn a_guest_that_was_paused_asleep_answers_who_came_meanwhile() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start_with(&[&FLAGS[..], &["--name", "web"]].concat());
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let mut clients = Clients::of(&bed);
    for _ in 0..2 {
        sleeps(&bed, &vm, &mut clients, || {});
    }
    bed.have(&["kill", "web"]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
}

#[test]
fn a_platform_is_told_who_came_for_a_guest_that_is_paused_and_wakes_it() {
    require_root_and_tun!();
    require_kvm!();
    let stand = Stand::new(false);
    let bed = &stand.bed;
    let mut vm = bed.start_with(&[&FLAGS[..], &["--name", "web"]].concat());
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let mut clients = Clients::of(bed);
    let events = stand.events();
    sleeps(bed, &vm, &mut clients, || {
        await_event(&events, "vm_asleep");
        let wake = await_event(&events, "wake");
        assert_eq!(
            (&wake["vm"], &wake["proto"]),
            (&"web".into(), &"tcp".into())
        );
        assert_eq!(wake["to"], format!("{HOST}:8080"), "{wake}");
    });
    await_event(&events, "vm_awake");

    // A datagram alone wakes it, too. Of the connections nothing more may come, such as an acknowledgement
    // that the client's kernel delayed.
    await_quiet(&stand);
    have(bed, "sleep");
    bed.have(&["pause", "web"]);
    await_event(&events, "vm_asleep");
    clients.datagrams.send(b"one").unwrap();
    let wake = await_event(&events, "wake");
    assert_eq!(
        (&wake["vm"], &wake["proto"]),
        (&"web".into(), &"udp".into())
    );
    assert_eq!(wake["to"], format!("{HOST}:5353"), "{wake}");
    have(bed, "resume");
    let mut echoed = [0; 8];
    let len = clients.datagrams.recv(&mut echoed).unwrap();
    assert_eq!(&echoed[..len], b"one");
    bed.have(&["kill", "web"]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
}
