//! A compromised engine: the test, which is root, writes into the maps and sends the broker what
//! such an engine could.

use std::{
    io::IoSlice,
    net::IpAddr,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::atomic::Ordering::Release,
};

use nix::sys::socket::{ControlMessage, MsgFlags, SockType, getsockopt, sendmsg, sockopt};
use slipgate_abi::IfIndex;
use slipgate_testbed::{
    PinDir, Slipgate, World,
    clients::tcp,
    servers::{TcpServer, TcpService},
    world::UPLINK,
};

use crate::{Cell, Stand, WAIT, eventually, matrix::matrix, stand::maps};

matrix! {
    rows_that_name_other_devices_take_none_of_them_down: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    next_hops_of_other_devices_are_nobodys_neighbours: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    whatever_the_engine_says_the_broker_serves_on: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
}

fn is_up(world: &World, device: &str) -> bool {
    let link = world.host.ip(&format!("-o link show {device}")).unwrap();
    let flags = link.split_once('<').unwrap().1.split_once('>').unwrap().0;
    flags.split(',').any(|flag| flag == "UP")
}

fn rows_that_name_other_devices_take_none_of_them_down(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let [guest, other] = ["tap0", "tap1"].map(|tap| cell.guest_at(&world, tap));
    let server = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Echo).unwrap();
    let connect = || guest.run(|| tcp::connect(server.address(), WAIT));
    let pins = PinDir::new().unwrap();
    let taps = ["--tap", "tap0", "--tap", "tap1", "--uplink", UPLINK];
    let both = [&taps, ipv6].concat();
    let mut slipgate = Slipgate::attach(&world.host, &pins, &both).unwrap();
    drop(connect().unwrap());
    let uplink = world.host.ifindex(UPLINK).unwrap();
    let lie = || {
        let maps = maps(&pins);
        for row in maps.vm_rows() {
            maps.vm(row).unwrap().tap_ifindex().store(uplink, Release);
        }
    };
    // While it serves, over changes of links too.
    lie();
    world
        .host
        .ip("link add other0 type veth peer name other1")
        .unwrap();
    world.host.ip("link del other0").unwrap();
    eventually("it noticed", || slipgate.stats().ok());
    assert!(is_up(&world, UPLINK) && is_up(&world, "tap1"));
    // The next one does not serve the second any more, and shuts it: by what was noted of it.
    slipgate.kill_both().unwrap();
    lie();
    let one = [&["--tap", "tap0", "--uplink", UPLINK], ipv6].concat();
    slipgate = Slipgate::attach(&world.host, &pins, &one).unwrap();
    assert!(is_up(&world, UPLINK), "a row of a VM's took it down");
    assert!(!is_up(&world, "tap1"), "it is not served any more");
    drop(connect().unwrap());
    lie();
    assert!(slipgate.stop().unwrap().success());
    assert!(is_up(&world, UPLINK) && !is_up(&world, "tap0"));
    assert!(pins.pins().is_empty(), "{:?}", pins.pins());
    drop(other);
}

fn next_hops_of_other_devices_are_nobodys_neighbours(cell: Cell) {
    // Of another device's network, and a host of the uplink's that nobody has asked for.
    let (other_net, bits, asked) = match cell.is_ipv6() {
        false => ("100.64.0.", "24", "198.18.0.77"),
        true => ("fd64::", "64 nodad", "2001:db8:1::77"),
    };
    let stand = Stand::of(cell, &[]);
    let host = &stand.world.host;
    host.ip("link add other0 type veth peer name other1")
        .unwrap();
    host.ip("link set other1 up").unwrap();
    host.ip("link set other0 up").unwrap();
    host.ip(&format!("addr add {other_net}1/{bits} dev other0"))
        .unwrap();
    let other = host.ifindex("other0").unwrap();
    let uplink = host.ifindex(UPLINK).unwrap();
    let maps = maps(stand.slipgate.pins());
    let claim = |ifindex, neighbour: &str| {
        let ifindex = IfIndex::new(ifindex);
        let claimed = maps.claim_next_hop(0, ifindex, neighbour.parse::<IpAddr>().unwrap(), 0);
        claimed.expect("an element");
    };
    claim(other, &format!("{other_net}9"));
    claim(uplink, &format!("{other_net}10"));
    // As it may be: it tells when the broker has looked.
    let neighbours = |device: &str| {
        host.ip(&format!("neigh show nud all dev {device}"))
            .unwrap()
    };
    assert!(!neighbours(UPLINK).contains(asked));
    claim(uplink, asked);
    host.ip("link set other1 down").unwrap();
    eventually("the broker's look", || {
        neighbours(UPLINK)
            .contains(&format!("{asked} "))
            .then_some(())
    });
    let all = neighbours("other0") + &neighbours(UPLINK);
    assert!(!all.contains(other_net), "{all}");
}

/// The engine's end of the channel to the broker, taken out of that process.
fn channel_of(engine: u32) -> OwnedFd {
    let owned = |fd: libc::c_long| {
        // SAFETY: the kernel made it for us just now, if it did.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
    };
    // SAFETY: numbers only.
    let pidfd = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, engine, 0) }).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{engine}/fd")).unwrap();
    let mut fds = fds.filter_map(|fd| fd.ok()?.file_name().to_str()?.parse::<i32>().ok());
    fds.find_map(|fd| {
        // SAFETY: as above.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0) };
        let is_it = |fd: &OwnedFd| getsockopt(fd, sockopt::SockType) == Ok(SockType::SeqPacket);
        owned(copy).filter(is_it)
    })
    .expect("a channel")
}

/// Says something as the engine, with a descriptor besides.
fn say(channel: &OwnedFd, head: [u8; 2], json: &str) {
    let rights = [channel.as_raw_fd()];
    let parts = [IoSlice::new(&head), IoSlice::new(json.as_bytes())];
    let rights = [ControlMessage::ScmRights(&rights)];
    sendmsg::<()>(
        channel.as_raw_fd(),
        &parts,
        &rights,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )
    .unwrap();
}

const INLINE: [u8; 2] = [1, 0];

fn whatever_the_engine_says_the_broker_serves_on(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let address = (cell.server(), 7000);
    let server = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let broker = stand.slipgate.broker_pid();
    let descriptors = || {
        let fds = std::fs::read_dir(format!("/proc/{broker}/fd")).unwrap();
        fds.count()
    };
    let before = descriptors();
    let engine = stand.slipgate.engine_pid().unwrap();
    let channel = channel_of(engine);
    // Answers to what nobody asked.
    for unasked in [
        r#""Stopped""#,
        r#"{"Ready":{"adopted":18446744073709551615}}"#,
        r#"{"Applied":{"id":1,"cut":1,"kept":1,"left":1}}"#,
        r#"{"Reply":{"id":2,"reply":{"cut":{"flows":1}}}}"#,
        r#"{"Reply":{"id":3,"reply":"done"}}"#,
        r#"{"Reply":{"id":4,"reply":{"refused":{"why":"[31mno"}}}}"#,
        r#"{"Pong":{"id":5}}"#,
    ] {
        say(&channel, INLINE, unasked);
    }
    // Faster than anybody could do what it asks for.
    for _ in 0..5_000 {
        say(&channel, INLINE, r#""NextHopsWanted""#);
    }
    eventually("the broker serves", || stand.slipgate.stats().ok());
    let connect = |stand: &Stand| drop(stand.run(|| tcp::connect(server.address(), WAIT)).unwrap());
    connect(&stand);
    assert_eq!(stand.slipgate.engine_pid(), Some(engine));
    eventually("no descriptor stays", || {
        (descriptors() <= before).then_some(())
    });

    // What is no message ends the engine, and another takes its place.
    let nonsense = [
        (INLINE, "{"),
        (INLINE, r#"{"Nothing":1}"#),
        ([9, 0], r#""NextHopsWanted""#),
        // A file, which the broker does not read.
        ([1, 1], ""),
    ];
    let mut last = engine;
    for (head, json) in nonsense {
        say(&channel_of(last), head, json);
        last = eventually("another engine", || {
            stand.slipgate.engine_pid().filter(|pid| *pid != last)
        });
        connect(&stand);
    }
    let said = stand.says("talks nonsense");
    assert_eq!(
        said.matches("talks nonsense").count(),
        nonsense.len(),
        "{said}"
    );
    assert_eq!(stand.slipgate.broker_pid(), broker);
    assert!(stand.slipgate.stop().unwrap().success());
}
