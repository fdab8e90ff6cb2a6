//! Interrupts and doorbells, with a guest of a few instructions.
use std::{
    fs::File,
    sync::{Arc, mpsc},
    thread,
};

use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use slipgate_testbed::require_kvm;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{GsiRoutes, KvmDoorbells, create, open};
use crate::{
    GuestMemory, boot, cpuid,
    interrupt::{Doorbells, MsiFabric, MsiMessage},
    memory, vcpu,
};

#[path = "../../tests/payload/mod.rs"]
mod payload;
use payload::Code;

struct Rig {
    vm: Arc<VmFd>,
    vcpu: VcpuFd,
    // The VM's memory must stay mapped.
    _memory: GuestMemory,
}

fn rig(code: &Code) -> Rig {
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .unwrap();
    let kvm = open(kvm.into()).unwrap();
    let memory = memory::create(16 << 20).unwrap();
    let vm = create(&kvm, &memory).unwrap();
    let kernel = boot::load_bytes(&memory, code.image(), None, "").unwrap();
    let host = cpuid::Supported::of(&kvm, cpuid::Template::Host).unwrap();
    let vcpu = vcpu::create(&host, &vm, 0, 1, &kernel).unwrap().fd;
    Rig {
        vm: Arc::new(vm),
        vcpu,
        _memory: memory,
    }
}

/// Runs up to the next write to a port. Returns port and byte.
fn to_next_out(vcpu: &mut VcpuFd) -> (u16, u8) {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(port, bytes)) => return (port, bytes[0]),
            Ok(other) => panic!("{other:?}"),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => panic!("{error}"),
        }
    }
}

const BELL: u32 = 0xd000_1000;

#[test]
fn a_write_of_any_width_rings_without_an_exit() {
    require_kvm!();
    let address = BELL.to_le_bytes();
    let code = Code::new()
        // mov [bell], al, then ax, then eax
        .raw(&[0xa2])
        .raw(&address)
        .raw(&[0x66, 0xa3])
        .raw(&address)
        .raw(&[0xa3])
        .raw(&address)
        .out(0x80, 1)
        .raw(&[0xa3])
        .raw(&address)
        .spin();
    let mut rig = rig(&code);
    let bells = KvmDoorbells(rig.vm.clone());
    let bell = EventFd::new(EFD_NONBLOCK).unwrap();
    bells.connect(BELL.into(), &bell).unwrap();
    assert_eq!(to_next_out(&mut rig.vcpu), (0x80, 1));
    assert_eq!(bell.read().unwrap(), 3);

    bells.disconnect(BELL.into(), &bell);
    match rig.vcpu.run() {
        Ok(VcpuExit::MmioWrite(address, bytes)) => {
            assert_eq!((address, bytes.len()), (BELL.into(), 4));
        }
        other => panic!("{other:?}"),
    }
    assert!(bell.read().is_err(), "disconnected");
}

/// Returns code that waits for interrupts with vectors 0x31 and 0x32, and writes each vector to
/// port 0x80.
fn interruptible() -> Code {
    const TABLE: u32 = 0x20_0000;
    const POINTER: u32 = 0x20_1000;
    const IDLE: u32 = 0x20_3000;
    // mov al, vector; out 0x80, al; mov dword [0xfee000b0], 0 (EOI); push idle; ret
    let handler = |vector| {
        let mut code = vec![0xb0, vector, 0xe6, 0x80];
        code.extend([0xc7, 0x05, 0xb0, 0x00, 0xe0, 0xfe, 0, 0, 0, 0, 0x68]);
        code.extend(IDLE.to_le_bytes());
        code.push(0xc3);
        code
    };
    let mut code = Code::new()
        .place(POINTER, &[0xff, 0x07, 0, 0, 0x20, 0])
        // mov esp, 0x300000; sti; hlt; jmp to hlt. No handler returns by iret: KVM can't emulate it
        // in protected mode, where it has to emulate.
        .place(IDLE, &[0xbc, 0, 0, 0x30, 0, 0xfb, 0xf4, 0xeb, 0xfd]);
    for (vector, at) in [(0x31, 0x20_2000u32), (0x32, 0x20_2100)] {
        let [a, b, c, d] = at.to_le_bytes();
        // A 32-bit interrupt gate to the code segment, 0x10.
        let gate = [a, b, 0x10, 0, 0, 0x8e, c, d];
        code = code
            .place(at, &handler(vector))
            .place(TABLE + 8 * u32::from(vector), &gate);
    }
    // Local APIC on; lidt [pointer]; ready; mov eax, idle; jmp eax
    code.store(0xfee0_00f0, 0x1ff)
        .raw(&[0x0f, 0x01, 0x1d])
        .raw(&POINTER.to_le_bytes())
        .out(0x80, 1)
        .eax(IDLE)
        .raw(&[0xff, 0xe0])
}

/// Runs the guest on a thread, up to the byte 0x32. The channel gives its bytes to port 0x80.
fn run(mut vcpu: VcpuFd) -> (mpsc::Receiver<u8>, thread::JoinHandle<()>) {
    let (sender, bytes) = mpsc::channel();
    let thread = thread::spawn(move || {
        loop {
            let (port, byte) = to_next_out(&mut vcpu);
            assert_eq!(port, 0x80);
            sender.send(byte).unwrap();
            if byte == 0x32 {
                break;
            }
        }
    });
    (bytes, thread)
}

fn to_cpu_0(vector: u32) -> MsiMessage {
    MsiMessage {
        address: 0xfee0_0000,
        data: vector,
    }
}

#[test]
fn a_signal_interrupts_by_its_lines_route() {
    require_kvm!();
    let rig = rig(&interruptible());
    let routes = GsiRoutes::new(rig.vm.clone());
    let [first, second] = [(), ()].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
    let first_line = routes.connect(&first).unwrap();
    let second_line = routes.connect(&second).unwrap();
    assert!(first_line >= 24 && second_line >= 24 && first_line != second_line);
    // Without a route, the signal is lost.
    first.write(1).unwrap();
    routes.route(first_line, to_cpu_0(0x31)).unwrap();
    routes.route(second_line, to_cpu_0(0x32)).unwrap();

    let (bytes, thread) = run(rig.vcpu);
    assert_eq!(bytes.recv().unwrap(), 1, "ready");
    first.write(1).unwrap();
    assert_eq!(bytes.recv().unwrap(), 0x31);
    // What is signalled while a line is held interrupts once when it is not any more.
    routes.set_held(second_line, &second, true).unwrap();
    second.write(1).unwrap();
    second.write(1).unwrap();
    first.write(1).unwrap();
    assert_eq!(bytes.recv().unwrap(), 0x31);
    routes.route(second_line, to_cpu_0(0x31)).unwrap();
    routes.set_held(second_line, &second, false).unwrap();
    assert_eq!(bytes.recv().unwrap(), 0x31);
    assert!(second.read().is_err(), "the line has it");
    // A route that changed, then a line that was disconnected.
    routes.route(second_line, to_cpu_0(0x31)).unwrap();
    second.write(1).unwrap();
    assert_eq!(bytes.recv().unwrap(), 0x31);
    routes.disconnect(second_line, &second);
    second.write(1).unwrap();
    routes.route(first_line, to_cpu_0(0x32)).unwrap();
    first.write(1).unwrap();
    assert_eq!(bytes.recv().unwrap(), 0x32);
    thread.join().unwrap();
    assert!(bytes.recv().is_err(), "nothing else came");
    assert!(routes.route(second_line, to_cpu_0(0x31)).is_err());
}
