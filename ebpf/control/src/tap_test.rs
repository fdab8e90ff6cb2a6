use std::{
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

use super::*;
use crate::testing::{datapath, in_netns, run};

fn read_frame(fd: &impl AsFd) -> Option<Vec<u8>> {
    let mut frame = vec![0u8; 70_000];
    // SAFETY: room for as many bytes as given.
    let length = unsafe {
        libc::read(
            fd.as_fd().as_raw_fd(),
            frame.as_mut_ptr().cast(),
            frame.len(),
        )
    };
    (length >= 0).then(|| {
        frame.truncate(length as usize);
        frame
    })
}

#[test]
fn the_port_is_as_it_must_be_and_is_reopened() {
    in_netns("the_port_is_as_it_must_be_and_is_reopened", || {
        let datapath = datapath();
        let port = EnginePort::open(3, &mut Vec::new()).unwrap();
        assert_eq!(port.name, "sgport3");
        let flags = || Device::named("sgport3").unwrap().flags().unwrap();
        assert_eq!(flags() & libc::IFF_UP, 0, "down until its program is there");
        port.serve(&datapath, Hook::Tcx).unwrap();
        assert_ne!(flags() & libc::IFF_UP, 0);
        assert_ne!(flags() & libc::IFF_NOARP, 0);
        let shown = run("ip -d link show sgport3");
        for part in [
            "mtu 65521",
            "qlen 16384",
            "type tap",
            "multi_queue",
            "vnet_hdr",
            "persist on",
        ] {
            assert!(shown.contains(part), "`{part}` in: {shown}");
        }
        let features = run("ethtool -k sgport3");
        for on in ["tx-checksumming: on", "tcp-segmentation-offload: on"] {
            assert!(features.contains(on), "`{on}` in: {features}");
        }
        assert_eq!(
            run("sysctl -n net.ipv4.conf.sgport3.forwarding").trim(),
            "0"
        );
        assert_eq!(run("ip -6 addr show dev sgport3").trim(), "");
        let mut header_bytes = 0i32;
        // SAFETY: room for the int.
        let asked = unsafe {
            libc::ioctl(
                port.fd.as_raw_fd(),
                libc::TUNGETVNETHDRSZ,
                &raw mut header_bytes,
            )
        };
        assert_eq!((asked, header_bytes), (0, VNET_HEADER_BYTES));

        let ifindex = port.ifindex;
        drop(port);
        let again = EnginePort::open(3, &mut Vec::new()).unwrap();
        assert_eq!(again.ifindex, ifindex, "it persists");
        drop(again);
        assert!(EnginePort::remove(3).unwrap());
        assert!(!EnginePort::remove(3).unwrap());
    });
}

/// Has the host send a frame by a device.
fn send_by(device: &str, frame: &[u8]) {
    let index = Device::named(device).unwrap().ifindex().unwrap();
    // SAFETY: a socket of our own, an address of integers, and bytes that live during the call.
    let sent = unsafe {
        let socket = libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0);
        let mut to: libc::sockaddr_ll = std::mem::zeroed();
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = index.get() as i32;
        let (at, len) = ((&raw const to).cast(), size_of_val(&to) as u32);
        let sent = libc::sendto(socket, frame.as_ptr().cast(), frame.len(), 0, at, len);
        libc::close(socket);
        sent
    };
    assert_eq!(sent, frame.len() as isize);
}

#[test]
fn a_port_that_is_handed_over_keeps_the_frames_in_its_queue() {
    in_netns(
        "a_port_that_is_handed_over_keeps_the_frames_in_its_queue",
        || {
            let datapath = datapath();
            let port = EnginePort::open(0, &mut Vec::new()).unwrap();
            assert!(!port.handed_over);
            port.serve(&datapath, Hook::Tcx).unwrap();
            send_by("sgport0", &[7; 60]);

            // Another row's, and what is no TAP, are left.
            let (other, file) = (port.fd.try_clone(), std::fs::File::open("/dev/null"));
            let mut others = vec![other.unwrap(), file.unwrap().into()];
            let of_another_row = EnginePort::open(1, &mut others).unwrap();
            assert_eq!(others.len(), 2);
            assert!(!of_another_row.handed_over);
            assert_eq!(of_another_row.name, "sgport1");

            let again = EnginePort::open(0, &mut vec![port.fd]).unwrap();
            assert!(again.handed_over);
            assert_eq!(
                (again.name.as_str(), again.ifindex),
                ("sgport0", port.ifindex)
            );
            again.serve(&datapath, Hook::Tcx).unwrap();
            let frame = read_frame(&again.fd).expect("the frame of before");
            assert_eq!(frame[VNET_HEADER_BYTES as usize..], [7; 60]);
        },
    );
}

#[test]
fn the_host_sends_nothing_of_its_own_on_it() {
    in_netns("the_host_sends_nothing_of_its_own_on_it", || {
        let datapath = datapath();
        // Positive control: an ordinary TAP carries the host's IPv6 frames within this time.
        let ordinary = open_queue("ordinary", libc::IFF_MULTI_QUEUE).unwrap().0;
        let port = EnginePort::open(0, &mut Vec::new()).unwrap();
        port.serve(&datapath, Hook::Tcx).unwrap();
        Device::named("ordinary").unwrap().set_up(true).unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while read_frame(&ordinary).is_none() {
            assert!(Instant::now() < end, "the ordinary TAP is silent too");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(read_frame(&port.fd), None);
    });
}

#[test]
fn a_port_made_with_other_flags_is_made_anew() {
    in_netns("a_port_made_with_other_flags_is_made_anew", || {
        run("ip tuntap add sgport1 mode tap");
        run("ip link set sgport1 mtu 65521 arp off");
        let before = Device::named("sgport1").unwrap().ifindex().unwrap();
        let port = EnginePort::open(1, &mut Vec::new()).unwrap();
        assert_ne!(port.ifindex, before);
        assert_eq!(port.name, "sgport1");
    });
}

#[test]
fn a_device_of_somebody_elses_is_left_alone() {
    in_netns("a_device_of_somebody_elses_is_left_alone", || {
        run("ip tuntap add sgport1 mode tap multi_queue vnet_hdr");
        let before = Device::named("sgport1").unwrap().ifindex().unwrap();
        let port = EnginePort::open(1, &mut Vec::new()).unwrap();
        assert_eq!(port.name, format!("sgport{}", 1 + MAX_OWNERS));
        let ifindex = port.ifindex;
        drop(port);
        let again = EnginePort::open(1, &mut Vec::new()).unwrap();
        assert_eq!(again.ifindex, ifindex, "it persists");
        drop(again);
        assert!(EnginePort::remove(1).unwrap());
        let there = Device::named("sgport1").unwrap().ifindex().unwrap();
        assert_eq!(there, before);
    });
}
