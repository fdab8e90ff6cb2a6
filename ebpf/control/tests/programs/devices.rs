//! A guest's TAP, an uplink and the engine port in a network namespace of their own.
//!
//! Only the test's thread holds the namespace, so nothing outlives it.
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::{AsRawFd, FromRawFd},
    process::Command as Process,
};

use aya::programs::{
    SchedClassifier, TcAttachType,
    tc::{self, SchedClassifierLink},
};
use slipgate_abi::Protocol;

use crate::{
    datapath::*,
    frame::{Frame, sum16},
    pool::Datapath,
    skipped::skipped,
};

/// Time limit for an expected frame, ms. A frame that must not arrive needs no wait: when the write
/// to a TAP has returned, the programs and the redirect have run.
const PATIENCE_MS: i32 = 2_000;

/// Fields of `struct virtio_net_hdr` that the tests set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Vnet {
    pub(crate) needs_csum: bool,
    pub(crate) gso_type: u8,
    pub(crate) hdr_len: u16,
    pub(crate) gso_size: u16,
    pub(crate) csum_start: u16,
    pub(crate) csum_offset: u16,
}

impl Vnet {
    pub(crate) const TCPV4: u8 = 1;
    /// GSO type that becomes IP fragments; the kernel still accepts it from a TAP.
    pub(crate) const UDP: u8 = 3;
    pub(crate) const UDP_L4: u8 = 5;

    fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.needs_csum), self.gso_type];
        for half in [
            self.hdr_len,
            self.gso_size,
            self.csum_start,
            self.csum_offset,
        ] {
            bytes.extend(half.to_ne_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Self {
        let half = |at| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            needs_csum: bytes[0] & 1 != 0,
            gso_type: bytes[1],
            hdr_len: half(2),
            gso_size: half(4),
            csum_start: half(6),
            csum_offset: half(8),
        }
    }
}

/// A TAP (or TUN) and its descriptor.
pub(crate) struct Tap {
    file: File,
    pub(crate) ifindex: u32,
    /// Whether the kernel accepts UDP GSO (Linux 6.2).
    pub(crate) uso: bool,
}

impl Tap {
    fn open(name: &str, kind: libc::c_int) -> io::Result<Self> {
        const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
        const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
        const OFFLOADS: libc::c_ulong = 0x0f;
        const USO: libc::c_ulong = 0x60;
        // SAFETY: a path that ends with NUL.
        let fd = unsafe { libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened.
        let file = unsafe { File::from_raw_fd(fd) };
        // SAFETY: plain data.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let flags = kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = flags as i16;
        // SAFETY: the argument is what the request wants.
        if unsafe { libc::ioctl(fd, TUNSETIFF, &raw mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: no pointers.
        let uso = unsafe { libc::ioctl(fd, TUNSETOFFLOAD, OFFLOADS | USO) } == 0;
        // SAFETY: as above.
        if !uso && unsafe { libc::ioctl(fd, TUNSETOFFLOAD, OFFLOADS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        ip(&format!("link set {name} up"));
        let c_name: Vec<u8> = name.bytes().chain([0]).collect();
        // SAFETY: ends with NUL.
        let ifindex = unsafe { libc::if_nametoindex(c_name.as_ptr().cast()) };
        Ok(Self { file, ifindex, uso })
    }

    /// Writes a frame as the guest would.
    pub(crate) fn send(&self, vnet: Vnet, frame: &[u8]) {
        let bytes = [&vnet.bytes()[..], frame].concat();
        (&self.file).write_all(&bytes).expect("write to a TAP");
    }

    /// Writes a frame.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn try_send(&self, vnet: Vnet, frame: &[u8]) -> io::Result<()> {
        let bytes = [&vnet.bytes()[..], frame].concat();
        (&self.file).write_all(&bytes)
    }

    /// Returns the next frame. Panics if none arrives in time.
    #[track_caller]
    pub(crate) fn receive(&self) -> (Vnet, Vec<u8>) {
        let mut poll = libc::pollfd {
            fd: self.file.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid element.
        let ready = unsafe { libc::poll(&raw mut poll, 1, PATIENCE_MS) };
        assert_eq!(ready, 1, "no frame came out");
        self.poll().expect("a frame")
    }

    /// Returns a frame, if there is one.
    pub(crate) fn poll(&self) -> Option<(Vnet, Vec<u8>)> {
        let mut bytes = vec![0; 70_000];
        match (&self.file).read(&mut bytes) {
            Ok(len) => Some((Vnet::parse(&bytes), bytes[10..len].to_vec())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("read from a TAP: {error}"),
        }
    }
}

pub(crate) struct Bed {
    /// Detached before others get the programs.
    _links: Vec<SchedClassifierLink>,
    pub(crate) datapath: Datapath,
    pub(crate) guest: Tap,
    pub(crate) world: Tap,
    pub(crate) port: Tap,
}

/// Kind of the uplink.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Uplink {
    L2,
    L3,
}

/// Runs a test between devices. Without the requirements prints that the test is skipped.
pub(crate) fn between_devices(test: &str, uplink: Uplink, run: impl FnOnce(Bed) + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let Some(datapath) = Datapath::for_test(test) else {
                return;
            };
            // SAFETY: concerns this thread only, which ends with the test.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                let error = io::Error::last_os_error();
                return skipped(test, &format!("no network namespace: {error}"));
            }
            // The kernel would send frames of its own. Without IPv6 there is no such file.
            for scope in ["all", "default"] {
                let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
            }
            match bed(datapath, uplink) {
                Ok(bed) => run(bed),
                Err(error) => skipped(test, &format!("no TAP: {error}")),
            }
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

fn bed(mut datapath: Datapath, uplink: Uplink) -> io::Result<Bed> {
    let guest = Tap::open("guest0", libc::IFF_TAP)?;
    let port = Tap::open("port0", libc::IFF_TAP)?;
    let world = if uplink == Uplink::L2 {
        let world = Tap::open("world0", libc::IFF_TAP)?;
        let [a, b, c, d, e, f] = UPLINK_MAC;
        ip(&format!(
            "link set world0 address {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"
        ));
        world
    } else {
        Tap::open("world0", libc::IFF_TUN)?
    };
    datapath.uplink = world.ifindex;
    datapath.set_tap(guest.ifindex, VM, ROW);
    datapath.vms.change(ROW, |vm| {
        vm.tap_ifindex = guest.ifindex;
        vm.port_ifindex = port.ifindex;
    });
    datapath.hops.change(HOP, |hop| {
        hop.ifindex = world.ifindex;
        if uplink == Uplink::L3 {
            hop.flags = slipgate_abi::link::NextHopFlags::NO_L2;
        }
    });
    let ingress = if uplink == Uplink::L2 {
        "uplink_ingress"
    } else {
        "uplink_ingress_l3"
    };
    let mut links = Vec::new();
    for (device, program) in [
        ("guest0", "guest_egress"),
        ("port0", "engine_port"),
        ("world0", ingress),
    ] {
        // Needed before tcx (6.6), harmless after.
        tc::qdisc_add_clsact(device).expect("clsact");
        let program: &mut SchedClassifier = datapath
            .ebpf
            .program_mut(program)
            .unwrap()
            .try_into()
            .unwrap();
        let link = program.attach(device, TcAttachType::Ingress);
        let link = program.take_link(link.expect("attach"));
        links.push(link.expect("its link"));
    }
    Ok(Bed {
        _links: links,
        datapath,
        guest,
        world,
        port,
    })
}

/// Runs `ip` in this thread's namespace.
pub(crate) fn ip(arguments: &str) {
    let output = Process::new("ip")
        .args(arguments.split(' '))
        .output()
        .expect("run ip");
    assert!(
        output.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Returns a frame whose checksum field holds only the pseudo-header's sum, and the header that
/// declares it.
pub(crate) fn partial(frame: &Frame) -> (Vnet, Vec<u8>) {
    let mut bytes = frame.bytes();
    let (at, l4_len) = (
        if frame.protocol == 6 { 16 } else { 6 },
        (bytes.len() - 34) as u16,
    );
    let mut pseudo = bytes[26..34].to_vec();
    pseudo.extend([0, frame.protocol]);
    pseudo.extend(l4_len.to_be_bytes());
    bytes[34 + at..36 + at].copy_from_slice(&sum16(&pseudo).to_be_bytes());
    let vnet = Vnet {
        needs_csum: true,
        csum_start: 34,
        csum_offset: at as u16,
        ..Vnet::default()
    };
    (vnet, bytes)
}

/// Returns a frame with its partial checksum completed, as a device does.
pub(crate) fn completed(vnet: Vnet, mut frame: Vec<u8>) -> Vec<u8> {
    if vnet.needs_csum {
        let start = usize::from(vnet.csum_start);
        let at = start + usize::from(vnet.csum_offset);
        let sum = match !sum16(&frame[start..]) {
            0 if frame[23] == 17 => 0xffff,
            sum => sum,
        };
        frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    frame
}

/// Returns a guest's frame in the form in which the world receives it.
pub(crate) fn sent_on(frame: &Frame) -> Frame {
    Frame {
        destination_mac: ROUTER_MAC,
        source_mac: UPLINK_MAC,
        source: NAT,
        source_port: 61_001,
        ttl: frame.ttl - 1,
        ..frame.clone()
    }
}

/// Returns a frame of the world in the form in which the guest receives it.
pub(crate) fn delivered(frame: &Frame) -> Frame {
    Frame {
        destination_mac: GUEST_MAC,
        source_mac: GATEWAY_MAC,
        destination: GUEST,
        destination_port: 40_000,
        ttl: frame.ttl - 1,
        ..frame.clone()
    }
}

/// Returns a frame of the world to the uplink's own address.
pub(crate) fn from_world(protocol: Protocol) -> Frame {
    Frame {
        destination_mac: UPLINK_MAC,
        ..Frame::rx(protocol)
    }
}
