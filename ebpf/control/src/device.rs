//! Requests to one network device: `netdevice(7)` ioctls and its sysctls.
//!
//! All of them concern the calling thread's network namespace.

use std::{
    ffi::CStr,
    fs, io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use slipgate_abi::IfIndex;

use crate::{Error, Result};

/// A device, known by its name. After a rename or removal, requests fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    name: String,
}

impl Device {
    /// Returns the device of that name.
    ///
    /// # Errors
    /// There is no such device.
    pub fn named(name: &str) -> Result<Self> {
        let device = Self { name: name.into() };
        device.ifindex()?;
        Ok(device)
    }

    /// Returns the device of that index.
    ///
    /// # Errors
    /// There is no such device.
    pub fn with_index(ifindex: IfIndex) -> Result<Self> {
        let mut name = [0 as libc::c_char; libc::IF_NAMESIZE];
        // SAFETY: room for a name, as the call wants.
        let found = unsafe { libc::if_indextoname(ifindex.get(), name.as_mut_ptr()) };
        if found.is_null() {
            return Err(Error::NoInterface(format!("with index {ifindex}")));
        }
        // SAFETY: filled and terminated by the call.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
        })
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the index of the device.
    ///
    /// # Errors
    /// The device is gone.
    pub fn ifindex(&self) -> Result<IfIndex> {
        // ENODEV, or a name that can't be one.
        let missing = |_| Error::NoInterface(format!("named `{}`", self.name));
        let request = self.query(libc::SIOCGIFINDEX).map_err(missing)?;
        // SAFETY: the union's field that this request fills.
        Ok(IfIndex::new(unsafe { request.ifr_ifru.ifru_ifindex } as u32))
    }

    /// Brings the device up or down.
    ///
    /// # Errors
    /// The kernel refuses the change, or the device is gone.
    pub fn set_up(&self, up: bool) -> Result<()> {
        self.change_flags(libc::IFF_UP, up)
    }

    /// Sets whether the device uses ARP (no `IFF_NOARP`).
    pub(crate) fn set_arp(&self, arp: bool) -> Result<()> {
        self.change_flags(libc::IFF_NOARP, !arp)
    }

    /// Returns the flags of the device, `IFF_*`.
    pub(crate) fn flags(&self) -> Result<i32> {
        let request = self
            .query(libc::SIOCGIFFLAGS)
            .map_err(self.failed("read the flags of"))?;
        // SAFETY: the union's field that this request fills.
        Ok(i32::from(unsafe { request.ifr_ifru.ifru_flags }))
    }

    fn change_flags(&self, bit: i32, on: bool) -> Result<()> {
        let flags = self.flags()?;
        let wanted = if on { flags | bit } else { flags & !bit };
        if wanted == flags {
            return Ok(());
        }
        self.modify(libc::SIOCSIFFLAGS, |request| {
            request.ifr_ifru.ifru_flags = wanted as i16;
        })
        .map_err(self.failed("change the flags of"))
    }

    /// Returns the MTU, L3 bytes.
    ///
    /// # Errors
    /// The device is gone.
    pub fn mtu(&self) -> Result<u32> {
        let request = self
            .query(libc::SIOCGIFMTU)
            .map_err(self.failed("read the MTU of"))?;
        // SAFETY: the union's field that this request fills.
        Ok(unsafe { request.ifr_ifru.ifru_mtu } as u32)
    }

    /// Sets the MTU, L3 bytes.
    ///
    /// # Errors
    /// The kernel refuses the change, or the device is gone.
    pub fn set_mtu(&self, bytes: u32) -> Result<()> {
        self.modify(libc::SIOCSIFMTU, |request| {
            request.ifr_ifru.ifru_mtu = bytes as i32;
        })
        .map_err(self.failed(&format!("set an MTU of {bytes} on")))
    }

    /// Sets the device's IPv4 address and the length of its network's prefix.
    pub(crate) fn set_address(&self, address: Ipv4Addr, prefix_len: u8) -> Result<()> {
        let mask = u32::MAX
            .checked_shl(32 - u32::from(prefix_len))
            .unwrap_or(0);
        let what = format!("set the address {address}/{prefix_len} of");
        self.modify(libc::SIOCSIFADDR, |request| {
            request.ifr_ifru.ifru_addr = sockaddr(address);
        })
        .map_err(self.failed(&what))?;
        self.modify(libc::SIOCSIFNETMASK, |request| {
            request.ifr_ifru.ifru_netmask = sockaddr(Ipv4Addr::from_bits(mask));
        })
        .map_err(self.failed(&what))
    }

    /// Sets the length of the transmit queue, packets.
    pub(crate) fn set_queue_length(&self, packets: u32) -> Result<()> {
        self.modify(libc::SIOCSIFTXQLEN, |request| {
            request.ifr_ifru.ifru_metric = packets as i32;
        })
        .map_err(self.failed(&format!("set a queue of {packets} packets on")))
    }

    /// Sets whether the host forwards IPv4 packets that arrive at the device.
    ///
    /// # Errors
    /// The sysctl cannot be written.
    pub fn set_forwarding(&self, on: bool) -> Result<()> {
        self.write_sysctl("ipv4", "forwarding", on)
    }

    /// Whether the kernel has IPv6 for the device.
    pub(crate) fn has_ipv6(&self) -> bool {
        self.sysctl("ipv6", "disable_ipv6").exists()
    }

    /// Disables IPv6 on the device, if the kernel has it, so that the host sends no IPv6 packets
    /// there.
    ///
    /// # Errors
    /// The device is gone, or the kernel refuses it.
    pub fn disable_ipv6(&self) -> Result<()> {
        if !self.has_ipv6() {
            return Ok(());
        }
        self.write_sysctl("ipv6", "disable_ipv6", true)
    }

    fn sysctl(&self, family: &str, key: &str) -> PathBuf {
        // Paths, unlike names of sysctls, allow a dot in a device's name.
        Path::new("/proc/sys/net")
            .join(family)
            .join("conf")
            .join(&self.name)
            .join(key)
    }

    /// Sets a sysctl of the device that is on or off.
    pub(crate) fn write_sysctl(&self, family: &str, key: &str, on: bool) -> Result<()> {
        let path = self.sysctl(family, key);
        let value = if on { "1" } else { "0" };
        if fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
            return Ok(());
        }
        fs::write(&path, value).map_err(Error::os(format!("write {value} to {}", path.display())))
    }

    /// Whether a sysctl of the device is on; `None`: the kernel does not have it.
    pub(crate) fn read_sysctl(&self, family: &str, key: &str) -> Option<bool> {
        let value = fs::read_to_string(self.sysctl(family, key)).ok()?;
        Some(value.trim() != "0")
    }

    fn failed(&self, what: &str) -> impl FnOnce(io::Error) -> Error {
        Error::os(format!("{what} the interface {}", self.name))
    }

    fn request(&self) -> io::Result<libc::ifreq> {
        let name = self.name.as_bytes();
        if name.is_empty() || name.len() >= libc::IF_NAMESIZE || name.contains(&0) {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        // SAFETY: a struct of integers and pointers that only the kernel interprets.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name) {
            *to = *from as libc::c_char;
        }
        Ok(request)
    }

    fn query(&self, code: libc::Ioctl) -> io::Result<libc::ifreq> {
        let mut asked = self.request()?;
        // SAFETY: a device request with its struct.
        unsafe { request(libc::AF_INET, code, &raw mut asked) }?;
        Ok(asked)
    }

    fn modify(&self, code: libc::Ioctl, fill: impl FnOnce(&mut libc::ifreq)) -> io::Result<()> {
        let mut asked = self.request()?;
        fill(&mut asked);
        // SAFETY: a device request with its struct.
        unsafe { request(libc::AF_INET, code, &raw mut asked) }
    }
}

/// An IPv4 address as device and route requests have it.
pub(crate) fn sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    // Behind the port.
    for (to, from) in data[2..].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as libc::sa_family_t,
        sa_data: data,
    }
}

/// Makes a device or route request, an ioctl of any socket of its family.
///
/// # Safety
/// `argument` is valid, and of the type that the kernel reads and writes for `code`.
pub(crate) unsafe fn request<T>(
    family: libc::c_int,
    code: libc::Ioctl,
    argument: *mut T,
) -> io::Result<()> {
    // SAFETY: plain arguments.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the caller's.
    if unsafe { libc::ioctl(socket.as_raw_fd(), code, argument) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
