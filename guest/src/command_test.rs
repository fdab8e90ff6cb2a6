use alloc::{string::ToString, vec};

use super::*;

fn server(host: &str, port: u16) -> Server {
    let host = match host.parse() {
        Ok(address) => Host::Address(address),
        Err(_) => Host::Name(host.into(), Family::Ipv4),
    };
    Server { host, port }
}

#[test]
fn every_workload_is_read() {
    let line = " dns www.example.test.; dns a.test 192.0.2.53;ping 10.0.2.2 3; crr 10.1.0.2:80 1000 x2;\
        crr a:7001 5; crr 10.1.0.2:7 9 echo ; rr 10.1.0.2:7 10 x3;\
        stream 10.1.0.2:9 100000000 up; stream 10.1.0.2:9 1 down raw x2; stream 10.1.0.2:9 5 mixed x64;\
        flood 10.1.0.2:9 7; flood 10.1.0.2:9 7 1500 x2; reset; fill 3; wait 0; wait 60ms;\
        wait 2s; serve 7 5s; serve 7 80 250ms; disk 0 write 512; disk 1 check 1024; disk 1 discard 512; disk 1 zero 1536;\
        disk 2 random 8192 9; disk 2 random 4096 7 x32; disk 0 log 8192 5;\
        disk 0 log 4096 64 x32; disk 1 scatter 8192 64; disk 1 scatter 4096 5 x32; vsock echo 5 3; vsock sink 6 1 70000;\
        vsock source 7 2 4096; vsock connect 52 3 9; vsock messages 52 2 1000;\
        vsock abort 53 1 7; balloon report 16; balloon follow 2s; selftest;;";
    let target = || server("10.1.0.2", 9);
    let vsock = |service, port, count| {
        Workload::Vsock(VsockWork {
            service,
            port,
            count,
        })
    };
    let connections = |server, count, at_once, exchange| Workload::Connections {
        server,
        count,
        at_once,
        exchange,
    };
    let stream = |bytes, direction, raw, at_once| Workload::Stream {
        server: target(),
        bytes,
        direction,
        raw,
        at_once,
    };
    let flood = |frame_bytes, at_once| Workload::Flood {
        server: target(),
        count: 7,
        frame_bytes,
        at_once,
    };
    let disk = |number, work, bytes| Workload::Disk {
        number,
        work,
        bytes,
    };
    let random = |count, at_once| DiskWork::Random { count, at_once };
    let log = |every, at_once| DiskWork::Log { every, at_once };
    let scatter = |every, at_once| DiskWork::Scatter { every, at_once };
    let read = parse(line).unwrap();
    assert_eq!(read.address, None);
    assert_eq!(
        read.workloads,
        vec![
            Workload::Dns {
                name: "www.example.test".into(),
                family: Family::Ipv4,
                resolver: None,
            },
            Workload::Dns {
                name: "a.test".into(),
                family: Family::Ipv4,
                resolver: Some(IpAddr::from([192, 0, 2, 53])),
            },
            Workload::Ping {
                host: Host::Address(IpAddr::from([10, 0, 2, 2])),
                count: 3
            },
            connections(server("10.1.0.2", 80), 1000, 2, Exchange::Get),
            connections(server("a", 7001), 5, 1, Exchange::Close),
            connections(server("10.1.0.2", 7), 9, 1, Exchange::Echo),
            Workload::RequestResponse {
                server: server("10.1.0.2", 7),
                count: 10,
                at_once: 3
            },
            stream(100_000_000, Direction::Up, false, 1),
            stream(1, Direction::Down, true, 2),
            stream(5, Direction::Mixed, false, 64),
            flood(64, 1),
            flood(1500, 2),
            Workload::Reset,
            Workload::Fill { mib: 3 },
            Workload::Wait { ms: 0 },
            Workload::Wait { ms: 60 },
            Workload::Wait { ms: 2000 },
            Workload::Serve {
                ports: vec![7],
                ms: 5000
            },
            Workload::Serve {
                ports: vec![7, 80],
                ms: 250
            },
            disk(0, DiskWork::Write, 512),
            disk(1, DiskWork::Check, 1024),
            disk(1, DiskWork::Discard, 512),
            disk(1, DiskWork::Zero, 1536),
            disk(2, random(9, 1), 8192),
            disk(2, random(7, 32), 4096),
            disk(0, log(5, 1), 8192),
            disk(0, log(64, 32), 4096),
            disk(1, scatter(64, 1), 8192),
            disk(1, scatter(5, 32), 4096),
            vsock(VsockService::Echo, 5, 3),
            vsock(VsockService::Sink(70_000), 6, 1),
            vsock(VsockService::Source(4096), 7, 2),
            vsock(VsockService::Connect(9), 52, 3),
            vsock(VsockService::Messages(1000), 52, 2),
            vsock(VsockService::Abort(7), 53, 1),
            Workload::Balloon(BalloonWork::Report { mib: 16 }),
            Workload::Balloon(BalloonWork::Follow { ms: 2000 }),
            Workload::SelfTest,
        ]
    );
}

#[test]
fn destinations_by_ipv6() {
    let address = |address: &str| Host::Address(address.parse().unwrap());
    let line = "ipv6; dns6 a.test 2001:db8::53; ping 2001:db8::1 1; ping [2001:db8::1] 1;\
        ping [a.test.] 1; rr [2001:db8::1]:7 5; rr [a.test]:7 5";
    let read = parse(line).unwrap().workloads;
    assert!(read.iter().all(Workload::is_by_ipv6), "{read:?}");
    let dns = Workload::Dns {
        name: "a.test".into(),
        family: Family::Ipv6,
        resolver: Some("2001:db8::53".parse().unwrap()),
    };
    let ping = |host| Workload::Ping { host, count: 1 };
    let rr = |host| Workload::RequestResponse {
        server: Server { host, port: 7 },
        count: 5,
        at_once: 1,
    };
    let named = || Host::Name("a.test".into(), Family::Ipv6);
    let due = [
        Workload::Ipv6,
        dns,
        ping(address("2001:db8::1")),
        ping(address("2001:db8::1")),
        ping(named()),
        rr(address("2001:db8::1")),
        rr(named()),
    ];
    assert_eq!(read, due);
    // The question goes to the network's resolver.
    let by_ipv4 = parse("dns6 a.test; dns a.test 192.0.2.1; ping a.test 1; rr a.test:7 1").unwrap();
    assert!(!by_ipv4.workloads.iter().any(Workload::is_by_ipv6));
    for workload in [&read[5], &read[6]] {
        let Workload::RequestResponse { server, .. } = workload else {
            panic!("{workload:?}");
        };
        let again = parse(&alloc::format!("rr {server} 5")).unwrap();
        assert_eq!(&again.workloads[0], workload);
    }
}

#[test]
fn an_address_of_its_own() {
    let read = parse("address 10.0.2.15/24 10.0.2.2 10.0.2.3; wait 1").unwrap();
    assert_eq!(
        read.address,
        Some(StaticAddress {
            address: [10, 0, 2, 15].into(),
            prefix: 24,
            router: [10, 0, 2, 2].into(),
            dns: Some([10, 0, 2, 3].into()),
        })
    );
    assert_eq!(read.workloads.len(), 1);
    assert_eq!(parse(" ; "), Ok(CommandLine::default()));
}

#[test]
fn what_is_wrong_is_named() {
    let name = "a".repeat(64);
    let cases = [
        ("console=ttyS0", "`console=ttyS0` is no workload"),
        ("wait 1; frob 2", "`frob` is no workload"),
        ("dns", "a name is missing"),
        ("dns a..b", "neither"),
        ("dns a.test b.test", "is not a resolver's"),
        (&*alloc::format!("dns {name}"), "neither"),
        ("ping 10.0.0.1 0", "`0` is not how often"),
        ("crr 10.0.0.1 5", "`10.0.0.1` is not HOST:PORT"),
        ("crr 10.0.0.1:0 5", "is not HOST:PORT"),
        ("crr 2001:db8::1:80 5", "`2001:db8::1:80` is not HOST:PORT"),
        ("crr [2001:db8::1] 5", "`[2001:db8::1]` is not HOST:PORT"),
        ("crr [10.0.0.1:80 5", "neither an address nor a name"),
        ("ping [fe80::1%2] 5", "neither an address nor a name"),
        ("crr 10.0.0.1:80 5 x0", "`x0` is not x1 to"),
        ("crr 10.0.0.1:80 5 x9999", "`x9999` is not x1 to"),
        ("crr 10.0.0.1:80 5 2", "`2` is one word too many"),
        ("stream 10.0.0.1:80 5", "`up`, `down` or `mixed` is missing"),
        (
            "stream 10.0.0.1:80 5 sideways",
            "is due where `sideways` is",
        ),
        ("stream 10.0.0.1:80 -5 up", "`-5` is not how many bytes"),
        ("flood 10.0.0.1:80 5 59", "60 to 65535"),
        ("flood 10.0.0.1:80 5 65536", "60 to 65535"),
        (
            "stream 10.0.0.1:80 up 5",
            "`up` is not how many bytes; it is `stream HOST:PORT BYTES up|down|mixed [raw] [xM]`",
        ),
        ("wait 99999999999", "no time in milliseconds or seconds"),
        ("wait 5000000s", "no time in milliseconds or seconds"),
        ("wait 5m", "as 60ms or 2s; it is `wait TIME"),
        ("wait", "a time, as 60ms or 2s, is missing"),
        ("fill 0", "`0` is not how many MiB; it is `fill MIB`"),
        ("serve 5s", "`5s` is not a port; it is `serve PORT"),
        ("serve 7", "a time, as 60ms or 2s, is missing"),
        ("serve 7 20000 5s", "ports from 1 to 16383"),
        ("disk 0 write 513", "513 bytes are no whole sectors of 512"),
        (
            "disk 0 random 512 9",
            "512 bytes are no whole blocks of 4096",
        ),
        ("disk 0 random 4096 0", "`0` is not how many reads"),
        ("disk 0 random 4096 9 x33", "x33 is not x1 to x32"),
        ("disk 0 log 512 9", "512 bytes are no whole blocks of 4096"),
        ("disk 0 log 4096 0", "`0` is not after how many writes"),
        ("disk 0 log 4096 9 x33", "x33 is not x1 to x32"),
        (
            "disk 0 scatter 512 9",
            "512 bytes are no whole blocks of 4096",
        ),
        ("disk 0 scatter 4096 0", "`0` is not after how many writes"),
        (
            "disk 0 read",
            "`write`, `check`, `discard`, `zero`, `random`, `scatter` or `log` is due",
        ),
        (
            "vsock send 5",
            "`echo`, `sink`, `source`, `connect`, `messages` or `abort` is due where `send` is; it is `vsock",
        ),
        ("vsock echo 5", "how many connections is missing"),
        ("vsock sink 5 1", "how many bytes is missing"),
        ("vsock messages 5 1 0", "`0` is not how many messages"),
        ("vsock echo 5 1 7", "`7` is one word too many"),
        ("selftest now", "`now` is one word too many"),
        ("address 10.0.2.15 10.0.2.2", "10.0.2.15/24"),
        ("address 10.0.2.15/31 10.0.2.2", "10.0.2.15/24"),
        ("wait 1; address 10.0.2.15/24 10.0.2.2", "first"),
    ];
    for (line, why) in cases {
        let error = parse(line).unwrap_err();
        assert!(error.to_string().contains(why), "{line}: {error}");
    }
}
