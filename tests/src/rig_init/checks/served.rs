//! A guest served from its lease to the orderly stop, slipgate being killed in between.

use std::{fs, net::SocketAddr, process::Command, time::Duration};

use slipgate_testbed::{
    Capture, CapturedFrame, Error, NetNs, Result, Uplink,
    census::Census,
    clients::{
        dns,
        tcp::{self, EchoSession},
        udp,
    },
    error::Tried,
    frame::{FrameBuilder, Packet},
    kernel_view, slipgate,
    world::{SERVER, UPLINK},
};

use super::{
    Report, expect, has_tcx,
    ipv6::{self, FORWARD},
    stand::{DNS, NAME, Stand, WAIT},
};

/// The story, one check after another: it ends when slipgate can't be attached.
pub(super) fn run(report: &mut Report) {
    let mut made = None;
    report.check("attach", || {
        let flags = [&ipv6::FLAGS[..], &["--forward", FORWARD]].concat();
        let stand = made.insert(Stand::new(Uplink::Veth, &flags)?);
        Ok(stand.slipgate.ready_line().to_owned())
    });
    let Some(mut stand) = made else { return };
    report.check("doctor", || doctor(&stand));
    report.check("hook", || hook(&stand));
    report.check("engine confined", || confined(&mut stand));
    // First of the traffic: nothing else is on its way to be counted.
    report.check("all in the kernel", || in_the_kernel(&stand));
    report.check("services", || services(&stand));
    report.check("refusal", || refusal(&stand));
    report.check("flows and stats", || accounting(&stand));
    report.check("IPv6 address", || ipv6::configured(&stand));
    report.check("IPv6 in the kernel", || ipv6::in_the_kernel(&stand));
    report.check("IPv6 names", || ipv6::names(&stand));
    report.check("IPv6 refusal", || ipv6::refusal(&stand));
    report.check("forward", || ipv6::forward(&stand));
    report.check("kill -9 and adoption", || adoption(&mut stand));
    report.check("others in front", || others_in_front(&stand));
    report.check("program taken away", || taken_away(&stand));
    report.check("stop", || stand.stop().map(|()| "no pin, no port".into()));
}

/// Checks that `doctor` reports nothing missing, and reports tcx correctly.
fn doctor(stand: &Stand) -> Result<String> {
    let mut command = Command::new(slipgate::binary()?);
    command.args(["doctor", "--uplink", UPLINK]);
    let output = stand.world.host.output(command)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let tcx = said.lines().find(|line| line.contains("tcx"));
    let without =
        tcx.is_some_and(|line| line.contains("clsact")) || said.contains("clsact serves instead");
    expect(tcx.is_some() && without != has_tcx(), || {
        format!("it says of tcx, with tcx {}:\n{said}", has_tcx())
    })?;
    Ok(tcx
        .unwrap_or_default()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" "))
}

/// tcx links where there is tcx, clsact filters elsewhere; nothing in the logs of either.
fn hook(stand: &Stand) -> Result<String> {
    let pins = stand.pins();
    for program in ["guest_egress", "uplink_ingress", "engine_port"] {
        let attached: Vec<_> = pins
            .iter()
            .filter(|pin| pin.starts_with(&format!("{program}-")))
            .collect();
        let fits = |pin: &String| pin.ends_with("-clsact") != has_tcx();
        expect(attached.len() == 1 && fits(attached[0]), || {
            format!("{program} is attached as {attached:?}; all pins: {pins:?}")
        })?;
    }
    Ok(if has_tcx() { "tcx" } else { "clsact" }.into())
}

/// Checks that the processes have no capability, no_new_privs and a seccomp filter.
fn confined(stand: &mut Stand) -> Result<String> {
    let none = || Error::unexpected("the engine does not run");
    let engine = stand.slipgate.engine_pid().ok_or_else(none)?;
    let path = format!("/proc/{engine}/status");
    let status = fs::read_to_string(&path).tried(format!("read {path}"))?;
    for (field, value) in [
        ("CapEff", "0000000000000000"),
        ("CapBnd", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let line = status
            .lines()
            .find(|line| line.starts_with(&format!("{field}:")));
        let found = line.and_then(|line| line.split_whitespace().nth(1));
        expect(found == Some(value), || {
            format!("the engine's status has {line:?}, not {value}")
        })?;
    }
    Ok(format!("process {engine}"))
}

/// DHCP, and DNS by both transports.
fn services(stand: &Stand) -> Result<String> {
    let lease = stand.guest.dhcp(WAIT)?;
    expect(lease.dns == [*DNS.ip()], || {
        format!("the lease is {lease:?}")
    })?;
    for ask in [dns::query_udp, dns::query_tcp] {
        let answer = stand.guest.run(|| ask(DNS, NAME, WAIT))?;
        expect(answer.addresses() == [SERVER], || {
            format!("{NAME} is {answer:?}")
        })?;
    }
    let asked = stand.names.udp_queries(NAME);
    expect(asked == 1, || {
        format!("{asked} questions went out, the second is in the cache")
    })?;
    let took = lease.took.as_millis();
    Ok(format!(
        "{} after {took} ms, {NAME} over UDP and TCP",
        lease.address
    ))
}

/// Checks that of the guest's packets none but those that open flows leave by the engine port: the
/// SYNs of TCP, and the first packet of a UDP flow and of a ping.
fn in_the_kernel(stand: &Stand) -> Result<String> {
    let frames = || kernel_view::frames_sent(&stand.world.host, stand.slipgate.engine_port());
    let census = Census::start(&stand.guest)?;
    let before = frames()?;
    let said = stand.traffic()?;
    let server = stand.datagrams.address();
    let pace = Duration::from_millis(5);
    let echoed = stand
        .guest
        .run(|| udp::paced(server, 50, 1000, pace, WAIT))?;
    expect(echoed.received == 50 && echoed.corrupt == 0, || {
        format!("of 50 datagrams came back {echoed:?}")
    })?;
    let sent = census.finish(&stand.guest)?;
    let (came, due) = (frames()? - before, sent.for_the_engine() + 2);
    // A retransmitted SYN and a datagram before the flow was open are the engine's too. An engine
    // that is awake takes first packets from its ring: they do not pass the port.
    expect(came >= 1 && came <= due + 4 && sent.data > 50, || {
        format!("{came} frames left by the port, {due} open flows; the guest sent {sent:?}")
    })?;
    Ok(format!(
        "{said}; {came} frames by the engine port, {} not",
        sent.data
    ))
}

/// A flow that a rule denies is refused at once.
fn refusal(stand: &Stand) -> Result<String> {
    let to = stand.denied.address();
    let took = stand.guest.run(|| tcp::expect_refused(to))?;
    Ok(format!("by RST after {:.1} ms", took.as_secs_f64() * 1e3))
}

/// `slipgate flows` and `stats` know what passed.
fn accounting(stand: &Stand) -> Result<String> {
    let flows = stand.slipgate.flows()?;
    let server = stand.streams.address().to_string();
    let passed = |flow: &slipgate::FlowRow| flow.tx_bytes.max(flow.rx_bytes) > 4 << 20;
    let bulk = flows
        .iter()
        .filter(|flow| flow.remote == server && passed(flow));
    expect(bulk.count() == 2, || {
        format!("`slipgate flows` shows {flows:?}")
    })?;
    let stats = stand.slipgate.stats()?;
    let total = &stats["total"];
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(u64::MAX);
    let bytes = number(&total["kernel"]["tx_bytes"]);
    expect(bytes > 4 << 20 && bytes < 8 << 20, || {
        format!("`slipgate stats` shows {stats:#}")
    })?;
    let refused = number(&total["refused"]["rule"]);
    let lost = number(&total["lost_after_redirect"]);
    expect((refused, lost) == (1, 0), || {
        format!("`slipgate stats` shows {stats:#}")
    })?;
    Ok(format!("{} flows, drops {}", flows.len(), total["drops"]))
}

/// Filters of somebody else's at the uplink and the TAP, which keep everything from slipgate, do not stay in
/// front of it.
fn others_in_front(stand: &Stand) -> Result<String> {
    let pins = stand.slipgate.pins();
    let mut names = pins.pins().into_iter();
    let drops = names
        .find(|pin| pin.ends_with("engine_port"))
        .ok_or_else(|| Error::unexpected("engine_port has no pin"))?;
    let drops = pins.path().join(drops);
    for device in [UPLINK, "tap0"] {
        let tc = |what: &str| tc(&stand.world.host, what);
        let filter = format!("dev {device} ingress pref 1 handle 1 bpf");
        // With tcx the uplink has no clsact qdisc.
        let _ = tc(&format!("qdisc add dev {device} clsact"));
        tc(&format!(
            "filter add {filter} da pinned {}",
            drops.display()
        ))?;
        let moved = format!("{device}: slipgate's program is first again");
        let until = std::time::Instant::now() + WAIT;
        while !has_tcx() && !stand.slipgate.stderr().contains(&moved) {
            expect(std::time::Instant::now() < until, || {
                format!("not within {WAIT:?}: {moved}")
            })?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut stream = stand
            .guest
            .run(|| tcp::connect(stand.echo.address(), WAIT))?;
        EchoSession::new(&mut stream).round(1000)?;
        tc(&format!("filter del {filter}"))?;
    }
    Ok("both behind".into())
}

/// A TAP whose program somebody removed carries nothing, on a host that routes.
fn taken_away(stand: &Stand) -> Result<String> {
    let host = &stand.world.host;
    for (key, value) in [
        ("ip_forward", "1"),
        ("conf.all.rp_filter", "0"),
        ("conf.tap0.rp_filter", "0"),
    ] {
        host.sysctl(&format!("net.ipv4.{key}"), value)?;
    }
    let broker = |signal| slipgate_testbed::signal(stand.slipgate.broker_pid(), signal);
    // The broker puts the program back, and turns forwarding off, at once. So it is stopped: as if it
    // had not seen either yet.
    broker(libc::SIGSTOP);
    let forward = || {
        broker(libc::SIGSTOP);
        host.sysctl("net.ipv4.conf.tap0.forwarding", "1")
    };
    if has_tcx() {
        let pins = stand.slipgate.pins();
        for pin in pins.pins() {
            if pin.to_string_lossy().contains("/guest_egress-") {
                fs::remove_file(pins.path().join(pin)).tried("remove the link's pin")?;
            }
        }
    } else {
        tc(host, "filter del dev tap0 ingress pref 1")?;
    }
    // The last reference to a link is dropped a moment later.
    std::thread::sleep(Duration::from_millis(500));
    let link = host.ip("-br link show tap0")?;
    let mac = link.split_whitespace().nth(2).unwrap_or_default();
    let bytes: Vec<_> = mac
        .split(':')
        .filter_map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect();
    let mac = bytes
        .try_into()
        .map_err(|_| Error::unexpected(format!("no MAC in {link}")))?;
    let config = stand.guest.config();
    let source = std::net::SocketAddrV4::new(config.address, 5_000);
    let to = std::net::SocketAddrV4::new(SERVER, 9);
    let (vnet, frame) = FrameBuilder::udp(source, to).macs(config.mac, mac).build();
    // The host's own frames are not asked about: it looks for its neighbours by IPv6.
    let uplink = Capture::keeping(host, UPLINK)?;
    let left = || {
        let frames = uplink.frames().into_iter();
        let is_it = |frame: &CapturedFrame| {
            let packet = Packet::of_ethernet(&frame.bytes);
            frame.sent && packet.is_some_and(|packet| packet.destination == to.into())
        };
        frames.filter(is_it).count()
    };
    forward()?;
    for _ in 0..5 {
        stand.guest.inject(vnet, &frame)?;
    }
    broker(libc::SIGCONT);
    let unserved = stand.slipgate.stats()?["total"]["drops"]["unserved"]["packets"].as_u64();
    let after = left();
    expect(after == 0 && unserved >= Some(5), || {
        format!("{after} frames left, {unserved:?} were dropped")
    })?;
    // Without what stands behind it, the host routes them.
    forward()?;
    tc(host, "filter del dev tap0 ingress pref 65535")?;
    stand.guest.inject(vnet, &frame)?;
    let until = std::time::Instant::now() + WAIT;
    while left() == 0 && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    broker(libc::SIGCONT);
    // This one, and none of those before.
    let routed = left();
    expect(routed == 1, || {
        format!("{routed} frames left in all, and one should have")
    })?;
    Ok("5 of 5 dropped".into())
}

fn tc(host: &NetNs, args: &str) -> Result<()> {
    let mut command = Command::new("tc");
    command.args(args.split_whitespace());
    host.output(command).map(drop)
}

/// A connection of each family outlives both processes, and the next ones know it.
fn adoption(stand: &mut Stand) -> Result<String> {
    let echoes: [SocketAddr; 2] = [stand.echo.address().into(), stand.servers6.echo.address()];
    let connect = |to| stand.guest.run(|| tcp::connect(to, WAIT));
    let mut streams = [connect(echoes[0])?, connect(echoes[1])?];
    let mut rounds = |times| {
        let mut sessions = streams.each_mut().map(EchoSession::new);
        (0..times).try_for_each(|_| {
            let mut all = sessions.iter_mut();
            all.try_for_each(|session| session.round(1000).map(drop))
        })
    };
    rounds(1)?;
    stand.slipgate.kill_both()?;
    rounds(20)?;
    stand.slipgate = stand.slipgate.again()?;
    rounds(1)?;
    let flows = stand.slipgate.flows()?;
    for to in echoes {
        let to = to.to_string();
        let ours = flows
            .iter()
            .find(|flow| flow.remote == to && flow.proto == "tcp");
        let counted = ours.is_some_and(|flow| flow.verdict == "fast" && flow.tx_bytes > 22_000);
        expect(counted, || {
            format!("afterwards `slipgate flows` shows {flows:?}")
        })?;
    }
    let said = format!("{}, by IPv6 {}", stand.traffic()?, ipv6::traffic(stand)?);
    rounds(1)?;
    Ok(format!("{} flows kept; then {said}", flows.len()))
}
