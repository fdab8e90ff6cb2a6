# Ring 0: what is left of it. Each stub is as short as can be, since some hosts emulate ring 0 at
# two million instructions a second.
#
# Ring 3 asks for something with `hlt`, which raises #GP:
#   r11 = the interrupt counters as ring 3 last saw them: idle. Halts, unless they have moved since.
#   r11 = anything else, r10 = CALL: jumps to the routine at r9; it ends in `call_done`.
# Frame at #GP: [rsp] error code, +8 rip, +16 cs, +24 rflags, +32 rsp, +40 ss; rsp is a multiple of
# 16, so an interrupt during the halt pushes its five words right below.

.text
.balign 16
.global trap_general_protection
trap_general_protection:
    cmp r11, gs:[CPU_INTERRUPTS]
    jne 1f
    inc qword ptr [rsp + 8]             # past the hlt
    sti                                 # takes effect after the hlt: no interrupt slips between
3:  hlt                                 # an interrupt stub leaves for ring 3 directly
    jmp 3b                              # woken by something else, such as a second SIPI
1:  cmp r10d, CALL
    jne 2f
    inc qword ptr [rsp + 8]
    jmp r9
2:  push 13
    jmp trap_fault

# Interrupt slot k: counted in its byte of the counters, EOI. The frame of one that ended a halt,
# and the #GP's error code above it, are dropped: the next frame is ring 3's.
.macro interrupt slot
.balign 16
interrupt_\slot:
    inc byte ptr gs:[CPU_INTERRUPTS + \slot]
    mov dword ptr ds:[-0x11FFF50], 0    # 0xFEE000B0: EOI
    test byte ptr [rsp + 8], 3
    jz 1f
    iretq
1:  add rsp, 48
    iretq
.endm
    interrupt 0
    interrupt 1
    interrupt 2
    interrupt 3
    interrupt 4

# A spurious interrupt takes no EOI.
.balign 16
.global interrupt_spurious
interrupt_spurious:
    test byte ptr [rsp + 8], 3
    jz 1f
    iretq
1:  add rsp, 48
    iretq

.global call_nothing
# Routines for ring 3 (r10 = CALL, r9 = one of these).
.global call_write_msr, call_read_msr, call_allow_interrupts, call_flush_page
.global call_in_8, call_in_16, call_in_32, call_out_8, call_out_16, call_out_32, call_out_string
call_write_msr:
    wrmsr
    jmp call_done
call_read_msr:
    rdmsr
    jmp call_done
call_allow_interrupts:
    or qword ptr [rsp + 24], 0x200
    jmp call_done
call_flush_page:
    invlpg [rdi]
    jmp call_done
call_in_8:
    in al, dx
    jmp call_done
call_in_16:
    in ax, dx
    jmp call_done
call_in_32:
    in eax, dx
    jmp call_done
call_out_8:
    out dx, al
    jmp call_done
call_out_16:
    out dx, ax
    jmp call_done
call_out_32:
    out dx, eax
    jmp call_done
call_out_string:                        # not `rep outsb`: some VMMs drop a write of several bytes
    jrcxz call_done
1:  mov al, [rsi]
    out dx, al
    inc rsi
    dec rcx
    jnz 1b
call_nothing:
call_done:
    add rsp, 8
    iretq

# Exceptions: all end in Rust's `fault`, in ring 3, on a stack kept for that.
trap_fault:                             # [rsp] vector, +8 error code, +16 rip, ...
    pop rdi
    pop rsi
    mov rdx, [rsp]
    mov rcx, cr2
    mov r8, [rsp + 24]                  # rsp
    mov rax, gs:[CPU_FAULT_STACK]
    mov [rsp + 24], rax
    mov qword ptr [rsp + 8], 0x23
    mov qword ptr [rsp + 16], 2
    mov qword ptr [rsp + 32], 0x1B
    mov rax, offset fault
    mov [rsp], rax
    iretq

.macro exception vector, has_code
.balign 16
exception_\vector:
    .if \has_code == 0
    push 0
    .endif
    push \vector
    jmp trap_fault
.endm
.irp vector, 0, 1, 2, 3, 4, 5, 6, 7, 9, 16, 18, 19, 20
    exception \vector, 0
.endr
.irp vector, 8, 10, 11, 12, 14, 17, 21
    exception \vector, 1
.endr

.section .rodata
.balign 8
.global exception_stubs, interrupt_stubs
exception_stubs:                        # by vector, 0..=21
    .quad exception_0, exception_1, exception_2, exception_3, exception_4, exception_5, exception_6
    .quad exception_7, exception_8, exception_9, exception_10, exception_11, exception_12
    .quad trap_general_protection, exception_14, 0, exception_16, exception_17, exception_18
    .quad exception_19, exception_20, exception_21
interrupt_stubs:
    .quad interrupt_0, interrupt_1, interrupt_2, interrupt_3, interrupt_4
.text
