export PATH=/tmp/h/env_first/bin:$PATH OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE KVCACHE_PLUGINS_DATA=/work/shared/data
. /work/.library/env 2>/dev/null
export PATH=/tmp/h/env_first/bin:$PATH
