//! The built-in guest's image: initialises the machine and runs the workloads on every CPU that has
//! a queue pair.
#![no_std]
#![no_main]
extern crate alloc;

mod machine;

use alloc::vec::Vec;
use core::panic::PanicInfo;

use machine::{
    apic, bus, clock, console,
    cpu::{self, Cpu, Slot},
    memory,
    platform::{self, Machine},
    smp,
};
use slipgate_guest::{
    firmware::{acpi, pvh},
    json::Object,
    pci,
    run::{STATUS_FAILED, STATUS_PASSED, Shared, run},
    selftest::{self, Bench},
    virtio::{
        balloon::{BALLOON, Balloon},
        block::{DISK, DISK_TRANSITIONAL, Disk},
        net::{Card, Pair, Vectors, WANTED, local_mac},
        transport::{NETWORK_CARD, NETWORK_CARD_TRANSITIONAL, Transport},
        vsock::{VSOCK, Vsock},
    },
    workload,
};
use spin::{Mutex, Once};

/// Largest size of a queue.
const QUEUE_SIZE: u16 = 256;

/// State that CPU 0 prepares for the others.
struct Work {
    machine: Machine,
    shared: Shared,
    pairs: Vec<Mutex<Option<Pair<bus::Window>>>>,
}

static WORK: Once<Work> = Once::new();

/// Entry of ring 3 on CPU 0, with interrupts off and without a heap.
#[unsafe(no_mangle)]
extern "C" fn start(start_info: u64) -> ! {
    cpu::fill_idt();
    let clock_source = clock::start();
    apic::mask_legacy_interrupts();
    apic::start();
    apic::calibrate_timer();
    cpu::allow_interrupts();

    let memory = memory::Identity;
    let info = pvh::read(&memory, start_info, memory::image_end_address())
        .unwrap_or_else(|why| panic!("{why}"));
    let tables = acpi::read(&memory, info.rsdp).unwrap_or_else(|why| panic!("{why}"));
    // SAFETY: the loader's memory map lists it as free; the tables have been read, and the command
    // line lies below the image or is copied before anything else is allocated.
    let command_line = unsafe {
        memory::claim_heap(info.heap.0, info.heap.1);
        alloc::string::String::from(info.command_line)
    };
    if let Some(power_off) = tables.power_off {
        console::powers_off_by(power_off);
    }
    if let Some(address) = tables.generation_id {
        platform::generation_is_at(address);
    }
    let apic_ids = cpu::name_boot_cpu(tables.apic_ids());
    let cpus = smp::start(&apic_ids, serve);
    console::print_line(&alloc::format!(
        r#"{{"machine":"slipgate-guest","cpus":{cpus},"memory_mib":{},"clock":"{}","tsc_deadline":{},"ecam":{},"uptime_us":{}}}"#,
        info.heap.1 >> 20,
        clock_source.name(),
        clock::has_tsc_deadline(),
        tables.ecam.is_some(),
        clock::now_ns() / 1000,
    ));

    let config = bus::Config::new(tables.ecam);
    let card = pci::functions(&config).find(|function| {
        [NETWORK_CARD, NETWORK_CARD_TRANSITIONAL].contains(&pci::id(&config, *function))
    });
    let Some(card) = card else {
        if command_line.trim().is_empty() {
            console::exit(0);
        }
        panic!("no virtio network card on PCI bus 0");
    };
    let transport =
        Transport::find(&config, card, bus::Window::map).unwrap_or_else(|why| panic!("{why}"));
    let mac = local_mac(&Machine::new(1));
    let only_selftest = command_line.trim() == "selftest";
    if Shared::parse(&command_line, 1).selftest() {
        let bench = Bench {
            transport: &transport,
            config: &config,
            platform: &Machine::new(1),
            own_mac: mac,
            apic_id: apic_ids[0],
            interrupt: Slot::Test.vector(),
            taken: || Cpu::current().interrupts()[Slot::Test as usize],
        };
        if !selftest::run(&bench) {
            console::exit(STATUS_FAILED);
        }
        if only_selftest {
            console::exit(STATUS_PASSED);
        }
    }
    let passed = work_on_disks(&config, &command_line)
        && work_on_vsock(&config, &command_line)
        && work_on_balloon(&config, &command_line);
    if !passed {
        console::exit(STATUS_FAILED);
    }
    let vectors = Vectors {
        apic_ids: &apic_ids,
        queue: Slot::Queue.vector(),
        config: Slot::Config.vector(),
        taken: || Cpu::current().interrupts()[Slot::Queue as usize],
    };
    let card = Card::bring_up(&transport, &config, WANTED, QUEUE_SIZE, vectors, mac)
        .unwrap_or_else(|why| panic!("{why}"));
    let pairs: Vec<_> = card
        .pairs
        .into_iter()
        .map(|pair| Mutex::new(Some(pair)))
        .collect();
    let work = WORK.call_once(|| Work {
        machine: Machine::new(pairs.len()),
        shared: Shared::parse(&command_line, pairs.len()),
        pairs,
    });
    for index in 1..cpus {
        apic::interrupt(Cpu::number(index).apic_id, Slot::Wake);
    }
    console::exit(work.run(0))
}

/// Does the `disk` workloads. Returns whether all passed.
fn work_on_disks(config: &bus::Config, command_line: &str) -> bool {
    let mut passed = true;
    let shared = Shared::parse(command_line, 1);
    if shared.disk_work().next().is_none() {
        return true;
    }
    let is_disk =
        |function: &pci::Function| [DISK, DISK_TRANSITIONAL].contains(&pci::id(config, *function));
    let bring_up = |function| {
        let transport = Transport::find(config, function, bus::Window::map)?;
        Disk::bring_up(transport)
    };
    let disks = pci::functions(config).filter(is_disk).map(bring_up);
    let disks: Result<Vec<_>, _> = disks.collect();
    let mut disks = disks.unwrap_or_else(|why| panic!("{why}"));
    for (number, work, bytes) in shared.disk_work() {
        let disk = disks.get_mut(number as usize);
        let (line, well) = workload::disk::work(disk, &Machine::new(1), (number, work, bytes));
        console::print_line(&line.into_line());
        passed &= well;
    }
    passed
}

/// Does the `vsock` workloads. Returns whether all passed.
fn work_on_vsock(config: &bus::Config, command_line: &str) -> bool {
    let mut passed = true;
    let shared = Shared::parse(command_line, 1);
    if shared.vsock_work().next().is_none() {
        return true;
    }
    let device = pci::functions(config).find(|function| pci::id(config, *function) == VSOCK);
    let bring_up = |function| {
        let transport = Transport::find(config, function, bus::Window::map)?;
        Vsock::bring_up(transport)
    };
    let device = device.map(bring_up).transpose();
    let mut device = device.unwrap_or_else(|why| panic!("{why}"));
    for work in shared.vsock_work() {
        let port = u64::from(work.port);
        let listening = Object::about("listening", "vsock").number("port", port);
        if device.is_some() && work.service.listens() {
            console::print_line(&listening.into_line());
        }
        let (line, well) = workload::vsock::work(device.as_mut(), &Machine::new(1), work);
        console::print_line(&line.into_line());
        passed &= well;
    }
    passed
}

/// Does the `balloon` workloads. Returns whether all passed.
fn work_on_balloon(config: &bus::Config, command_line: &str) -> bool {
    let mut passed = true;
    let shared = Shared::parse(command_line, 1);
    if shared.balloon_work().next().is_none() {
        return true;
    }
    let device = pci::functions(config).find(|function| pci::id(config, *function) == BALLOON);
    let bring_up = |function| {
        let transport = Transport::find(config, function, bus::Window::map)?;
        Balloon::bring_up(transport)
    };
    let device = device.map(bring_up).transpose();
    let mut device = device.unwrap_or_else(|why| panic!("{why}"));
    for work in shared.balloon_work() {
        let (line, well) = workload::balloon::work(device.as_mut(), &Machine::new(1), work);
        console::print_line(&line.into_line());
        passed &= well;
    }
    passed
}

/// Entry of every other CPU.
fn serve(index: usize) -> ! {
    loop {
        if let Some(work) = WORK.get() {
            work.run(index);
            // The work is done, and no more will come.
            loop {
                Cpu::current().halt();
            }
        }
        Cpu::current().halt();
    }
}

impl Work {
    /// Runs the workloads on CPU `index`, if it has a queue pair. Returns the exit status.
    fn run(&self, index: usize) -> u8 {
        let pair = self.pairs.get(index).and_then(|pair| pair.lock().take());
        pair.map_or(0, |pair| run(index, &self.machine, pair, &self.shared))
    }
}

/// Handles an exception. No exception is expected.
#[unsafe(no_mangle)]
extern "C" fn fault(vector: u64, error_code: u64, instruction: u64, address: u64, stack: u64) -> ! {
    console::die(format_args!(
        "exception {vector} at {instruction:#x}, error code {error_code:#x}, cr2 {address:#x}, rsp {stack:#x}, cpu {}",
        Cpu::current().index()
    ))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    console::die(format_args!("{info}"))
}

/// Symbols that the precompiled core and alloc refer to. They are never called.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    console::die(format_args!("unwinding in an image that never unwinds"))
}
