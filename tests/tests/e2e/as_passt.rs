//! slipgate under the name of passt, as libvirt, libkrun and muvm start that, by a user without any
//! privilege.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use slipgate_testbed::{
    SocketGuest,
    clients::{tcp, udp, udp::UdpOutcome},
    require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    signal,
    world::{HOST, SERVER, SERVER_2},
};

use crate::{DNS, GUEST, WAIT, at, eventually, unprivileged::Place};
use slipgate_testbed::clients::dns;

const STREAMS: u16 = 7001;
const UDP_ECHO: u16 = 7003;
const FORBIDDEN: u16 = 7100;
const STREAM_BYTES: u64 = 10_000_000;
const MINUTE: Duration = Duration::from_secs(60);

struct Servers(
    #[allow(dead_code, reason = "held for their drop")] (DnsServer, [TcpServer; 2], UdpServer),
);

fn serve(place: &Place) -> Servers {
    let net = &place.world.net;
    let zone = Zone::from([("api.example.test".into(), Answer::a(SERVER_2, 300))]);
    let tcp = [STREAMS, FORBIDDEN]
        .map(|port| TcpServer::start(net, (SERVER_2, port), TcpService::Streams).unwrap());
    let udp = UdpServer::start(net, (SERVER_2, UDP_ECHO), UdpService::Echo).unwrap();
    Servers((DnsServer::start(net, (SERVER, 53), zone).unwrap(), tcp, udp))
}

/// slipgate's own flags, which those programs have no place for.
fn own_flags() -> String {
    format!("--dns {SERVER} --default deny --allow *.example.test:7000-7003")
}

/// A link by the name of passt, and a command by it, of the user.
fn passt(place: &Place, args: &[&str]) -> Command {
    let mut command = place.slipgate(args);
    // The program is the argument in front of these.
    let all: Vec<_> = command.get_args().map(|arg| arg.to_owned()).collect();
    let slipgate = place.file("slipgate");
    let named = place.file("passt");
    if !named.exists() {
        std::os::unix::fs::symlink(&slipgate, &named).unwrap();
    }
    let renamed = all
        .into_iter()
        .map(|arg| match arg == *slipgate.as_os_str() {
            true => named.clone().into_os_string(),
            false => arg,
        });
    let mut by_name = Command::new(command.get_program());
    by_name
        .args(renamed)
        .env("XDG_RUNTIME_DIR", place.file("run"))
        .env("SLIPGATE_PASST_FLAGS", own_flags());
    command = by_name;
    command
}

/// The guest has its lease and its policy, and streams pass.
fn works(guest: &SocketGuest) {
    guest.run(|| {
        let refused = tcp::connect(at(SERVER_2, STREAMS), WAIT).is_err();
        assert!(refused, "nobody has asked for its name");
        let ask = dns::query_udp(at(DNS, 53), "api.example.test", WAIT);
        assert_eq!(ask.unwrap().addresses(), [SERVER_2]);
        tcp::download(at(SERVER_2, STREAMS), STREAM_BYTES, 1, MINUTE).unwrap();
        tcp::upload(at(SERVER_2, STREAMS), STREAM_BYTES, 2, MINUTE).unwrap();
        let outcome = udp::probe(at(SERVER_2, UDP_ECHO), b"by passt's name", WAIT);
        assert!(
            matches!(outcome, Ok(UdpOutcome::Answered(_))),
            "{outcome:?}"
        );
        assert!(tcp::connect(at(SERVER_2, FORBIDDEN), WAIT).is_err());
    });
}

/// Waits until no process has this id.
fn await_end(pid: u32) {
    let gone = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z "))
            .then_some(())
    };
    eventually("the process in the background ends", gone);
}

#[test]
fn as_libvirt_starts_passt_a_guest_at_the_socket_has_its_network() {
    require_root_and_tun!();
    let place = Place::new();
    let _servers = serve(&place);
    let [socket, pid, log] = ["1-web-net0.socket", "1-web-net0-passt.pid", "passt.log"]
        .map(|name| place.file("run").join(name));
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let [socket_text, pid_text, log_text] = [text(&socket), text(&pid), text(&log)];
    let args = [
        "--one-off",
        "--socket",
        &socket_text,
        "--pid",
        &pid_text,
        "--mtu",
        "1500",
        "--log-file",
        &log_text,
        "--address",
        "10.0.2.15",
        "--netmask",
        "24",
        "--tcp-ports",
        "198.18.0.2/8080:80",
    ];
    let run = |args: &[&str]| -> Output {
        let mut command = passt(&place, args);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // To the end of its stderr, as libvirt does: what goes on in the background is not to hold it.
        let child: Child = place.world.host.spawn(command).unwrap();
        child.wait_with_output().unwrap()
    };
    let started = run(&args);
    let said = String::from_utf8_lossy(&started.stderr).into_owned();
    assert!(
        started.status.success(),
        "{said}: {:?}",
        fs::read_to_string(&log)
    );
    let background: u32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let name = fs::read_to_string(format!("/proc/{background}/cmdline")).unwrap();
    assert!(name.contains("attach"), "{name}");

    let guest = SocketGuest::connect(&socket).unwrap();
    let lease = guest.dhcp(WAIT).unwrap();
    assert_eq!((lease.address, lease.mtu), (GUEST, Some(1_500)));
    works(&guest);
    let flows = place.output(&["flows", "--json"]);
    assert!(flows.contains("1-web-net0"), "{flows}");
    let _web = TcpServer::start(&guest.ns, (GUEST, 80), TcpService::Echo).unwrap();
    let world = &place.world.net;
    let mut client = world.run(|| tcp::connect(at(HOST, 8080), WAIT)).unwrap();
    tcp::EchoSession::new(&mut client).round(10_000).unwrap();

    // The VMM ends, and it does.
    drop((client, guest));
    await_end(background);
    eventually("nothing is left", || {
        (!pid.exists() && !socket.exists() && place.user.has_nothing_left()).then_some(())
    });

    // Killed by its file, as libvirt does; and what can't be is said at once.
    assert!(run(&args).status.success());
    let background: u32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    signal(background, libc::SIGTERM);
    await_end(background);
    let args = [
        "--socket",
        &socket_text,
        "--pid",
        &pid_text,
        "--tcp-ports",
        "all",
    ];
    let refused = run(&args);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--tcp-ports all"));
    let args = ["--socket", "/nowhere/a.socket"];
    let refused = run(&args);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("/nowhere/a.socket"), "{said}");
}

/// As the first libvirt with passt, 9.0, starts it: the file of the process id is libvirt's own, which is
/// open in the process that it starts, and nobody is told the id of the process in the background.
#[test]
fn as_libvirt_9_0_starts_passt_a_guest_at_the_socket_has_its_network() {
    require_root_and_tun!();
    let place = Place::new();
    let _servers = serve(&place);
    let socket = place.file("run/1-web-net0.socket");
    let log = place.file("run/passt.log");
    let args = [
        "--one-off",
        "--socket",
        socket.to_str().unwrap(),
        "--mac-addr",
        "52:54:00:12:34:56",
        "--log-file",
        log.to_str().unwrap(),
        "--address",
        "10.0.2.15",
        "--netmask",
        "24",
        "--tcp-ports",
        "198.18.0.2/8080-8083:80-83,~8081-8082",
    ];
    let mut command = passt(&place, &args);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let started = place.world.host.spawn(command).unwrap();
    let started = started.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&started.stderr).into_owned();
    assert!(started.status.success(), "{said}");
    let guest = SocketGuest::connect(&socket).unwrap();
    assert_eq!(guest.dhcp(WAIT).unwrap().address, GUEST);
    works(&guest);
    let _web = TcpServer::start(&guest.ns, (GUEST, 83), TcpService::Echo).unwrap();
    let connect = |port| {
        let world = &place.world.net;
        world.run(|| tcp::connect(at(HOST, port), WAIT))
    };
    let mut client = connect(8083).unwrap();
    tcp::EchoSession::new(&mut client).round(10_000).unwrap();
    assert!(connect(8081).is_err(), "it is left out");
    drop((client, guest));
    eventually("nothing is left", || {
        (!socket.exists() && place.user.has_nothing_left()).then_some(())
    });
}

/// muvm's and libkrun's way: `passt -q -f --fd N`.
#[test]
fn as_muvm_starts_passt_a_guest_by_a_descriptor_has_its_network() {
    works_by_a_descriptor(SocketGuest::over);
}

/// libkrun offers its guest checksums and segmentation (`COMPAT_NET_FEATURES`), and takes the header that
/// tells of them away in front of the stream: segments are as long as a frame can be, above any MTU, and
/// have half a checksum, questions to the resolver as well.
#[test]
fn a_guest_of_libkrun_may_leave_checksums_and_segments_to_its_card() {
    works_by_a_descriptor(SocketGuest::of_libkrun);
}

fn works_by_a_descriptor(guest: impl FnOnce(UnixStream) -> slipgate_testbed::Result<SocketGuest>) {
    require_root_and_tun!();
    let place = Place::new();
    let _servers = serve(&place);
    let (theirs, ours) = UnixStream::pair().unwrap();
    let inherited: OwnedFd = ours.into();
    let fd = inherited.as_raw_fd();
    let mut command = passt(&place, &["-q", "-f", "--fd", &fd.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let keep = move || {
        // SAFETY: a number only.
        match unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: only an async-signal-safe call is made between fork and exec.
    unsafe { command.pre_exec(keep) };
    let mut child = place.world.host.spawn(command).unwrap();
    drop(inherited);
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(
        line.starts_with("slipgate: ready: guest-") && line.ends_with("is connected\n"),
        "{line}"
    );
    let guest = guest(theirs).unwrap();
    assert_eq!(guest.dhcp(WAIT).unwrap().address, GUEST);
    works(&guest);
    drop(guest);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert!(place.user.has_nothing_left());
}
