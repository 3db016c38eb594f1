#!/bin/sh
# First process of the guest, run from the run's shared folder: mounts folders, creates the rails, runs the command.
# Input files in that folder:
#   mounts  TAG PATH ro|rw   rails  DEVICE INTERFACE ADDRESS   job  the command, a shell script
# Output files: ready (seconds since boot), status (exit status of the command), failed (error message).
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
run=/rdma_vm

off() {
	sync
	printf '\0' | dd of=/dev/port bs=1 seek=1281 2>/dev/null # QEMU's isa-debug-exit
	echo o >/proc/sysrq-trigger
	sleep 60
}
fail() {
	echo "rdma_vm: $*" >/dev/console
	echo "$*" >$run/failed
	off
}

mkdir -p /dev/shm /dev/pts
for folder in /run /tmp /dev/shm; do mount -t tmpfs tmpfs $folder; done
mount -t devpts devpts /dev/pts
ln -sf /proc/self/fd /dev/fd
ulimit -l unlimited
ip link set lo up
while read -r tag path mode; do
	mkdir -p "$path"
	cache=none
	[ "$mode" = ro ] && cache=loose
	mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=$cache,$mode "$tag" "$path" || fail "cannot mount $path"
done <$run/mounts

modprobe dummy numdummies=0
modprobe virtio_net
modprobe rdma_rxe && modprobe ib_uverbs && modprobe rdma_ucm || fail "no soft-RoCE in this kernel"
while read -r device interface address; do
	case $interface in dummy*) ip link add "$interface" type dummy || fail "no interface $interface" ;; esac
	ip link set "$interface" mtu 9000 up && ip addr add "$address/24" dev "$interface" || fail "no interface $interface"
	rdma link add "$device" type rxe netdev "$interface" || fail "no device $device on $interface"
done <$run/rails

for port in /sys/class/virtio-ports/*; do
	[ "$(cat "$port/name")" = output ] && output=/dev/${port##*/}
done
cut -d' ' -f1 /proc/uptime >$run/ready
sh $run/job </dev/null >"$output" 2>&1
echo $? >$run/status
off
