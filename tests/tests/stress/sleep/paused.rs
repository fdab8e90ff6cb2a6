//! The same of a guest that is paused: a machine of `slipgate run`, whose platform pauses it and puts its VM to
//! sleep, and has both go on when an event says that somebody came.
use std::{
    net::SocketAddr,
    path::Path,
    process::Command,
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use slipgate_testbed::{
    MicroVm, NetNs, PinDir, Slipgate, World, clients::api, impairment::SplitMix64, require_kvm,
    slipgate, world::UPLINK,
};

use super::{Bounds, Connect, Nap, amid, assert_at_once, come, dropped, paced_by_both};
use crate::{BOTH_HOSTS, WAIT, at, below, eventually, in_turn, knob, random};

/// Ports of the guest's server. Each takes 16 connections at a time, and so many clients come within a third
/// of a second: together they have room for a sleep of more than two.
const PORTS: [u16; 8] = [7, 8, 9, 10, 11, 12, 13, 14];
/// Where the host's ports that lead to them begin.
const HOST_PORTS: u16 = 8000;
/// The longest that the platform takes to resume the guest, milliseconds, and leaves it awake then.
const LONGEST_DELAY_MS: u64 = 250;
const LONGEST_AWAKE_MS: u64 = 200;
/// How often a platform that waits for somebody looks whether all is over.
const LOOK: Duration = Duration::from_millis(50);
const NAME: &str = "web";

/// Time in which the guest was paused: from after that was said until before it was resumed; within a [`Nap`].
struct Pause {
    nap: Nap,
    from: Instant,
    until: Instant,
}

/// A daemon, and a machine whose guest serves behind its forwards; fields go in order.
struct Stage {
    vm: MicroVm,
    daemon: Slipgate,
    world: World,
    folder: tempfile::TempDir,
}

impl Stage {
    fn new(bounds: &Bounds) -> Self {
        let (world, pins) = (World::new().unwrap(), PinDir::new().unwrap());
        world.give_ipv6().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (api, read) = (path("api.sock"), path("read.sock"));
        let policy = bounds.file();
        let flags = [
            "--uplink",
            UPLINK,
            "--ipv6",
            "nat",
            "--api",
            &api,
            "--api-read",
            &read,
        ];
        let of_policy = ["--policy", policy.to_str().unwrap()];
        let flags = [&flags[..], &of_policy].concat();
        let daemon = Slipgate::serve(&world.host, &pins, &flags).unwrap();

        let ports = PORTS.map(|port| port.to_string()).join(" ");
        let work = format!("ipv6; serve {ports} 600s");
        let forwards = PORTS.map(|port| format!("tcp:{}:{port}", HOST_PORTS + port));
        let mut flags = vec!["--name", NAME, "--memory", "64", "--uplink", UPLINK];
        flags.extend(["--cmdline", &work, "--forward", "udp:5353:7"]);
        flags.extend(forwards.iter().flat_map(|forward| ["--forward", forward]));
        let mut vm = MicroVm::start(&world.host, &pins, &flags).unwrap();
        vm.await_line(r#""workload":"ipv6""#, WAIT).unwrap();
        let stage = Self {
            vm,
            daemon,
            world,
            folder,
        };
        // It resets a client until its server has begun, and its neighbours are to know it.
        for number in 0..2 * PORTS.len() {
            let connects = || Connect::make(Self::forward(number));
            eventually("it serves", || stage.world.net.run(connects).is_ok());
        }
        stage
    }

    /// Where a client of this number connects to: by each family in turn, and to each port.
    fn forward(number: usize) -> SocketAddr {
        let port = PORTS[number / 2 % PORTS.len()];
        at(*in_turn(&BOTH_HOSTS, number), HOST_PORTS + port)
    }

    /// Has `work` done while the guest is paused now and then.
    fn amid_pauses<T>(&self, work: impl FnOnce() -> T) -> (Vec<Pause>, T) {
        let platform = Platform {
            daemon: &self.daemon,
            host: &self.world.host,
            broker: self.vm.broker_pid(),
            knocks: knocks(&self.folder.path().join("read.sock")),
            random: random(),
        };
        amid(|is_over| platform.pause_at_random(is_over), work)
    }
}

/// The events that tell the platform of somebody who came.
fn knocks(socket: &Path) -> mpsc::Receiver<Value> {
    api::events(socket, &format!("/v1/events?kind=wake&vm={NAME}")).unwrap()
}

/// Who pauses the guest and wakes it.
struct Platform<'a> {
    daemon: &'a Slipgate,
    host: &'a NetNs,
    /// The process of `slipgate run`.
    broker: u32,
    knocks: mpsc::Receiver<Value>,
    random: SplitMix64,
}

impl Platform<'_> {
    fn pause_at_random(mut self, is_over: &AtomicBool) -> Vec<Pause> {
        let mut pauses = Vec::new();
        while !is_over.load(SeqCst) {
            let nap_from = Instant::now();
            self.daemon.run(&["sleep", NAME]).unwrap();
            self.of_machine(&["pause", NAME]);
            let from = Instant::now();
            assert_eq!(self.state(), "paused");
            self.await_knock(is_over);
            self.rest(LONGEST_DELAY_MS);
            assert_eq!(self.state(), "paused");
            let until = Instant::now();
            self.daemon.run(&["resume", NAME]).unwrap();
            let nap = Nap {
                from: nap_from,
                until: Instant::now(),
            };
            pauses.push(Pause { nap, from, until });
            self.rest(LONGEST_AWAKE_MS);
        }
        pauses
    }

    /// Waits for somebody who came since the guest was put to sleep.
    fn await_knock(&self, is_over: &AtomicBool) {
        while self.knocks.recv_timeout(LOOK).is_err() && !is_over.load(SeqCst) {}
        // More who come are told of once a second, and are none of the next sleep's.
        while self.knocks.try_recv().is_ok() {}
    }

    fn rest(&mut self, most_ms: u64) {
        let ms = 1 + below(&mut self.random, most_ms);
        thread::sleep(Duration::from_millis(ms));
    }

    /// Runs `slipgate ARGS…`, a command for the machine, which needs no pins. Returns what it prints.
    fn of_machine(&self, args: &[&str]) -> Vec<u8> {
        let mut command = Command::new(slipgate::binary().unwrap());
        command.args(args);
        self.host.output(command).unwrap().stdout
    }

    /// The machine's state, as its broker says.
    fn state(&self) -> Value {
        let machines = self.of_machine(&["ps", "--json"]);
        let machines: Vec<Value> = serde_json::from_slice(&machines).unwrap();
        let mut ours = machines.iter().filter(|it| it["pid"] == self.broker);
        ours.next()
            .map(|it| it["state"].clone())
            .unwrap_or_default()
    }
}

/// Checks that who came while the guest was paused had an answer when it was resumed, and not before.
#[track_caller]
fn assert_the_guest_answered(connects: &[Connect], pauses: &[Pause]) {
    let mut came = 0;
    for connect in connects {
        let mut all = pauses.iter();
        let met = all.find(|pause| (pause.from..pause.until).contains(&connect.began));
        let Some(pause) = met else { continue };
        came += 1;
        let answered = connect.began + connect.took;
        assert!(answered >= pause.until, "somebody answered for the guest");
    }
    println!("{came} connects to a guest that was paused");
    assert!(came > 0);
}

#[test]
fn none_of_those_who_come_for_a_guest_that_is_paused_now_and_then_is_lost() {
    begin!();
    require_kvm!();
    let clients = knob("SLIPGATE_STRESS_KNOCKS", 1_000);
    let stage = Stage::new(&Bounds::new("packets = 1_000"));
    let net = &stage.world.net;
    let (pauses, (connects, datagrams)) = stage.amid_pauses(|| come(net, clients, Stage::forward));
    assert_eq!(
        (datagrams.lost(), datagrams.corrupt),
        (0, 0),
        "{datagrams:?}"
    );
    let naps: Vec<_> = pauses.iter().map(|pause| pause.nap).collect();
    println!("{} sleeps", naps.len());
    assert!(naps.len() > 1);
    assert_at_once(&connects, &naps);
    assert_the_guest_answered(&connects, &pauses);
    assert_eq!(dropped(&stage.daemon, "engine_busy"), 0);
}

#[test]
fn datagrams_beyond_the_bound_of_a_guest_that_is_paused_now_and_then_are_counted() {
    begin!();
    require_kvm!();
    let stage = Stage::new(&Bounds::new("packets = 4"));
    let net = &stage.world.net;
    let (pauses, report) = stage.amid_pauses(|| {
        let (every, patience) = (Duration::from_millis(4), Duration::from_secs(2));
        paced_by_both(net, 1_000, every, patience)
    });
    let busy = dropped(&stage.daemon, "engine_busy");
    println!("{} sleeps, {busy} beyond the bound", pauses.len());
    assert!(busy > 0, "every sleep was shorter than five datagrams");
    assert!(report.received > 0, "{report:?}");
    // Each came back, or was counted.
    assert_eq!(report.sent, report.received + busy);
    assert_eq!((report.corrupt, report.duplicated), (0, 0), "{report:?}");
}
